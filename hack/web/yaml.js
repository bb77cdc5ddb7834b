export { LineCounter, parseAllDocuments, visit } from "yaml";
