// Shows the version that the address names, v2 unless it names v1. The address chooses from this table and nothing else, so that no
// link can make the page show, or send a key to, another server's document.
"use strict";

const documents = { v1: "/v1/openapi.yaml", v2: "/api/v2/openapi.yaml" };
const version = new URLSearchParams(location.search).get("version") === "v1" ? "v1" : "v2";

document.getElementById("document").href = documents[version];
document.querySelector(`[data-version="${version}"]`).setAttribute("aria-current", "page");

SwaggerUIBundle({
  dom_id: "#reference",
  url: documents[version],
  layout: "BaseLayout",
  presets: [SwaggerUIBundle.presets.apis],
  deepLinking: true,
  docExpansion: "list",
  displayRequestDuration: true,
  defaultModelsExpandDepth: 0,
  persistAuthorization: false, // a key stays in the memory of the page
  queryConfigEnabled: false,
  validatorUrl: null, // or the document would be sent to another host
});
