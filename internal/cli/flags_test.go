package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/api/openapi"
)

// numbers lists every flag that takes a number or a duration, by command. A pointer names the schema
// in the contract that bounds it; reason says why a flag has none.
var numbers = map[string]struct{ args, pointer, reason string }{
	"apikey create --days":           {"x --scope vault:read", "components/schemas/CreateAPIKeyRequest/properties/expires_in_days", ""},
	"tenant limit --v1":              {"ten_x", "components/schemas/TenantLimits/properties/v1", ""},
	"tenant limit --v2":              {"ten_x", "components/schemas/TenantLimits/properties/v2", ""},
	"compliance score --head":        {"--framework soc2", "paths//api/v2/compliance/score/get/parameters/head", ""},
	"compliance report --head":       {"--framework soc2 --output none", "paths//api/v2/compliance/report/get/parameters/head", ""},
	"audit verify --from":            {"", "paths//api/v2/audit/entries/{sequence}/get/parameters/sequence", ""},
	"audit verify --to":              {"", "paths//api/v2/audit/entries/{sequence}/get/parameters/sequence", ""},
	"settings --names-kept-days":     {"", "components/schemas/SettingsRequest/properties/names_kept_days", ""},
	"put --ttl-days":                 {"x", "", "no request has it before the credential is looked for"},
	"get --version":                  {"x", "", "the credential is looked for first"},
	"renew --ttl-days":               {"x", "", "the credential is looked for first"},
	"undo --version":                 {"x", "", "likewise"},
	"history --diff":                 {"x", "", "likewise"},
	"env push --ttl-days":            {"x", "", "no request has it before the credential is looked for"},
	"generate --ttl-days":            {"x y", "", "no request has it before the credential is looked for"},
	"generate --length":              {"x y", "", "the value is made here"},
	"seal --ttl-days":                {"--from-literal a=b --name x --namespace x --type x", "components/schemas/SealRequest/properties/ttl_days", ""},
	"import env --ttl-days":          {"", "", "the tests of internal/cli/importer have it sent"},
	"import json --ttl-days":         {"", "", "likewise"},
	"import aws --ttl-days":          {"", "", "likewise"},
	"webhook --drain":                {"", "", "no request has it"},
	"uninstall --timeout":            {"", "", "no request has it"},
	"crd apply --timeout":            {"", "", "no request has it"},
	"agent --timeout":                {"", "", "no request has it"},
	"kms-plugin retire --generation": {"x --dir x --etcd x", "", "no request has it"},
	"keys create --rotation-days":    {"x", "components/schemas/CreateKeyRequest/properties/rotation_period", ""},
	"audit search --hours":           {"", "paths//api/v2/audit/logs/get/parameters/hours", ""},
	"audit search --limit":           {"", "", "it counts over all pages"},
	"audit tail --after":             {"", "paths//api/v2/audit/tail/get/parameters/after", ""},
	"import vault --ttl-days":        {"", "", "likewise"},
}

// Flags that become a number in a request have the bounds of the contract: what the REST interface
// refuses is not sent in another shape, and what it takes is sent as it was typed.
func TestNumbersOnTheCommandLineHaveTheBoundsOfTheContract(t *testing.T) {
	var contract map[string]any
	must(t, yaml.Unmarshal([]byte(openapi.V2()), &contract))
	seen := map[string]bool{}
	eachFlag(Command(), func(cmd *cobra.Command, f *pflag.Flag) {
		if !slices.Contains([]string{"string", "bool", "stringSlice", "stringArray"}, f.Value.Type()) {
			seen[strings.TrimPrefix(cmd.CommandPath(), "latticekeep ")+" --"+f.Name] = true
		}
	})
	for name := range numbers {
		if !seen[name] {
			t.Errorf("there is no flag %s", name)
		}
	}
	var bodies []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		bodies = append(bodies, r.URL.RequestURI()+" "+string(b))
		w.WriteHeader(http.StatusForbidden)
	}))
	t.Cleanup(server.Close)
	for name := range seen {
		n, ok := numbers[name]
		if !ok {
			t.Errorf("%s takes a number: enter its schema, or why it has none", name)
			continue
		}
		path, flag, _ := strings.Cut(name, " --")
		try := func(value string) error {
			bodies = nil
			args := append(strings.Fields(path+" "+n.args), "--"+flag+"="+value)
			if n.pointer != "" {
				args = append(args, "--url", server.URL)
				if path != "seal" {
					args = append(args, "--api-key", "x")
				}
			}
			_, err := run(t, args...)
			return err
		}
		refused := []string{"-5", "x", ""}
		if n.pointer != "" {
			low, high := bounds(t, contract, n.pointer)
			refused = append(refused, strconv.FormatInt(low-1, 10), strconv.FormatInt(high+1, 10))
			for _, value := range []int64{low, high} {
				if err := try(strconv.FormatInt(value, 10)); err == nil || len(bodies) == 0 {
					t.Errorf("%s %d: %v, want the server's refusal", name, value, err)
				} else if strings.HasPrefix(n.pointer, "components") && path != "seal" && !strings.Contains(bodies[0], fmt.Sprintf(":%d", value)) {
					t.Errorf("%s %d: sent as %s", name, value, bodies[0])
				}
			}
		}
		for _, value := range refused {
			if err := try(value); err == nil || !strings.Contains(err.Error(), "--"+flag) || len(bodies) > 0 {
				t.Errorf("%s=%q: %v; sent: %q", name, value, err, bodies)
			}
		}
	}
}

// bounds returns the minimum and the maximum of a schema in the contract. A parameter is found by its
// name, on the path too.
func bounds(t *testing.T, contract map[string]any, pointer string) (low, high int64) {
	t.Helper()
	at := any(contract)
	_, rest, isPath := strings.Cut(pointer, "paths/")
	steps := strings.Split(pointer, "/")
	if isPath {
		i := strings.Index(rest, "/get/")
		steps = append([]string{"paths", rest[:i]}, strings.Split(rest[i+1:], "/")...)
	}
	for _, step := range steps {
		switch v := at.(type) {
		case map[string]any:
			at = v[step]
		case []any:
			i := slices.IndexFunc(v, func(p any) bool { return p.(map[string]any)["name"] == step })
			if i < 0 {
				t.Fatalf("%s: there is no %s", pointer, step)
			}
			at = v[i].(map[string]any)["schema"]
		default:
			t.Fatalf("%s: there is no %s", pointer, step)
		}
	}
	var s struct{ Minimum, Maximum *int64 }
	b, err := json.Marshal(at)
	must(t, err)
	must(t, json.Unmarshal(b, &s))
	if s.Minimum == nil || s.Maximum == nil {
		t.Fatalf("%s is not bounded: %s", pointer, b)
	}
	return *s.Minimum, *s.Maximum
}

// eachFlag calls use with every flag of every command.
func eachFlag(cmd *cobra.Command, use func(*cobra.Command, *pflag.Flag)) {
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) { use(cmd, f) })
	for _, c := range cmd.Commands() {
		eachFlag(c, use)
	}
}

// A flag whose value is an unset variable is refused, whatever it is: it may be what selects a tenant
// or pins a log.
func TestNoFlagIsEmpty(t *testing.T) {
	count := 0
	eachFlag(Command(), func(cmd *cobra.Command, f *pflag.Flag) {
		if f.Value.Type() == "bool" {
			return
		}
		count++
		for c := cmd; ; c = c.Commands()[0] { // a flag of a group counts for its commands
			if c.HasSubCommands() && c.Name() != "backup" {
				continue
			}
			args := append(strings.Fields(strings.TrimPrefix(c.CommandPath(), "latticekeep")), "--"+f.Name+"=")
			for range strings.Count(c.UseLine(), " ") { // as many arguments as the command takes, and no more
				if _, err := run(t, args...); err == nil || !strings.Contains(err.Error(), ", and was given ") {
					break
				}
				args = append(args, "x")
			}
			if _, err := run(t, args...); err == nil || !strings.Contains(err.Error(), "--"+f.Name) {
				t.Errorf("%v: %v", args, err)
			}
			return
		}
	})
	if count < 80 {
		t.Errorf("only %d flags were tried", count)
	}
}

// An API key that the command line makes ends after 90 days, unless somebody asks for one that does
// not.
func TestAnAPIKeyOfTheCommandLineExpires(t *testing.T) {
	var sent map[string]any
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		sent = nil
		_ = json.NewDecoder(r.Body).Decode(&sent)
		w.WriteHeader(http.StatusForbidden)
	}))
	t.Cleanup(server.Close)
	for flag, want := range map[string]any{"": 90., "--days=7": 7., "--no-expiry": nil} {
		args := strings.Fields("apikey create x --scope vault:read --api-key x " + flag)
		_, _ = run(t, append(args, "--url", server.URL)...)
		if sent["name"] != "x" || sent["expires_in_days"] != want {
			t.Errorf("%q: sent %v, want %v days", flag, sent, want)
		}
	}
	if _, err := run(t, strings.Fields("apikey create x --scope vault:read --days 7 --no-expiry --url http://127.0.0.1:1 --api-key x")...); err == nil || !strings.Contains(err.Error(), "no-expiry") {
		t.Error("a lifetime and none:", err)
	}
}

// Whoever sets the variable need not name the server again, whatever the command.
func TestEveryCommandThatCallsAServerTakesItsURLFromTheEnvironment(t *testing.T) {
	const server = "https://vault.example.org"
	t.Setenv("LATTICEKEEP_URL", server)
	taken := make(map[string]bool)
	eachFlag(Command(), func(cmd *cobra.Command, f *pflag.Flag) {
		if f.Name != "url" && f.Name != "server" {
			return
		}
		taken[strings.TrimPrefix(cmd.CommandPath(), "latticekeep ")] = true
		if f.Name != "url" || f.DefValue != server || !strings.HasSuffix(f.Usage, "(environment: LATTICEKEEP_URL)") {
			t.Errorf("%s --%s: %q, default %q", cmd.CommandPath(), f.Name, f.Usage, f.DefValue)
		}
		if len(f.Annotations[cobra.BashCompOneRequiredFlag]) > 0 {
			t.Errorf("%s --%s is required, whatever the environment says", cmd.CommandPath(), f.Name)
		}
	})
	for _, name := range []string{"seal", "reseal", "import sealed-secrets", "import env", "backup", "webhook", "audit verify", "audit export", "audit review", "compliance score", "tenant"} {
		if !taken[name] {
			t.Errorf("%s takes no URL", name)
		}
	}
}
