package dashboard_test

import (
	"bytes"
	"fmt"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/page"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// estate is an organisation that has been in use for some days.
type estate struct {
	*program
	owner      owner
	credential string // ids
	key        string
	entry      int64
	webhook    string
	meter      string // a credential that a policy reaches
	sealing    string // the fingerprint of a key, for what the cluster has
}

const day = 24 * time.Hour

// newEstate makes one, by nothing but the interface.
func newEstate(t testing.TB) *estate {
	t.Helper()
	e := &estate{program: startAt(t, -12*day)}
	ctx := t.Context()
	e.owner = e.register("Nordwind Energie eG", "mara.lindqvist@nordwind.example")
	o := e.owner
	again := func() { e.must(o.Login(ctx, v2.LoginRequest{Email: o.email, Password: o.password})) }
	e.verify(o)
	e.must(e.operator().ActivateTenant(ctx, e.tenant(o)))
	e.seal(o, "staging/feature-flags", "api_key", "sdk_key", "sdk-71c2", 10) // has expired by now
	key := func(name string, scopes ...v2.Scope) *client.V2 {
		k, err := o.CreateAPIKey(ctx, v2.CreateAPIKeyRequest{Name: name, Scopes: scopes, ExpiresInDays: new(365)})
		if err != nil {
			t.Fatal(err)
		}
		return e.newClient(client.WithAPIKey(k.ApiKey))
	}
	grafana := key("grafana", v2.ScopeVaultRead, v2.ScopeComplianceRead)
	billing := key("billing-worker", v2.ScopeVaultRead, v2.ScopeCryptoEncrypt, v2.ScopeCryptoDecrypt)
	key("release-pipeline", v2.ScopeVaultRead, v2.ScopeVaultWrite)
	for _, m := range []v2.InviteRequest{
		{Email: "jonas.weber@nordwind.example", Role: v2.RoleAdmin}, {Email: "priya.raman@nordwind.example", Role: v2.RoleMember}, {Email: "audit@kontor-pruefung.example", Role: v2.RoleAuditor},
	} {
		e.must(o.InviteMember(ctx, m))
		_, token, _ := strings.Cut(e.link(m.Email, "/join"), "#token=")
		e.must(e.newClient().AcceptInvitation(ctx, v2.AcceptInvitationRequest{Token: token, Password: "another quite long password"}))
	}

	later := func(days int) { // each day has a score
		for range days {
			e.advance(day)
			again()
			e.must(o.GetComplianceScore(ctx, &v2.GetComplianceScoreParams{Framework: v2.FrameworkSoc2}))
		}
	}
	later(6)
	e.credential = e.seal(o, "payments/stripe", "api_key", "secret_key", "sk_live_51HxYtQ2eZvKYlo2C", 90)
	e.meter = e.seal(o, "meters/timescale-primary", "database", "password", "kT9-velour-hazel", 30)
	e.seal(o, "meters/timescale-replica", "database", "password", "Rm4-copper-lantern", 30)
	e.seal(o, "grid-forecast/weather-api", "api_key", "key", "wx-82f1", 180)
	e.seal(o, "mail/smtp-relay", "basic_auth", "password", "pine-needle-42", 8)
	e.seal(o, "ci/container-registry", "token", "token", "glpat-x92", 365)
	e.seal(o, "backup/offsite", "ssh_key", "private_key", "-----BEGIN OPENSSH PRIVATE KEY-----", 90)
	e.seal(o, "kundenportal/sitzungsschlüssel", "webhook_secret", "secret", "k9s-0f", 60)
	e.seal(o, "partners/netzbetreiber-süd", "oauth_client", "client_secret", "ns-77", 11)
	for _, k := range []struct {
		name string
		days int
	}{{"meter-readings", 90}, {"customer-documents", 30}, {"invoices", 365}} {
		made, err := o.CreateKey(ctx, v2.CreateKeyRequest{Name: k.name, RotationPeriod: &k.days})
		if err != nil {
			t.Fatal(err)
		}
		e.key = made.Key.KeyId
	}
	e.must(o.RotateKey(ctx, e.key, v2.RotateKeyRequest{}))
	e.must(o.RotateCredential(ctx, e.credential))

	later(6)
	e.must(o.InviteMember(ctx, v2.InviteRequest{Email: "svea.holm@nordwind.example", Role: v2.RoleMember}))
	e.must(grafana.UnsealCredential(ctx, e.credential))
	e.must(billing.UnsealCredential(ctx, e.credential))
	sealed, err := billing.EncryptData(ctx, v2.EncryptRequest{Data: "invoice 2026-11"})
	if err != nil {
		t.Fatal(err)
	}
	e.must(billing.DecryptData(ctx, v2.DecryptRequest{CiphertextKem: sealed.CiphertextKem, CiphertextData: sealed.CiphertextData, Nonce: sealed.Nonce}))
	e.must(o.SignData(ctx, v2.SignRequest{Data: "release 4.2"}))
	for _, refused := range []func() error{
		func() error { return grafana.DeleteCredential(ctx, e.credential) },
		func() error { _, err := billing.RotateCredential(ctx, e.credential); return err },
		func() error { _, err := grafana.QueryAuditLog(ctx, nil); return err },
	} {
		if refused() == nil {
			t.Fatal("a key did what it may not")
		}
	}
	e.administer(o)
	e.endSessions(o)
	log, err := o.QueryAuditLog(ctx, &v2.QueryAuditLogParams{ResourceId: &e.credential})
	if err != nil {
		t.Fatal(err)
	}
	e.entry = log.Entries[0].Sequence
	if k, err := o.GetSealingKey(ctx); err == nil {
		e.sealing = k.KeyId
	} else {
		e.sealing = strings.Repeat("5f0c", 16)
	}
	return e
}

// administer makes policies, a group, a webhook and rules, of which the settings show.
func (e *estate) administer(o owner) {
	e.t.Helper()
	ctx := e.t.Context()
	policy := func(name string, rules ...v2.PolicyRuleRequest) string {
		made, err := o.CreatePolicy(ctx, v2.PolicyRequest{Name: name, Rules: rules})
		if err != nil {
			e.t.Fatal(err)
		}
		return made.Policy.PolicyId
	}
	reads := []v2.PathVerb{v2.PathVerbList, v2.PathVerbRead}
	meters := policy("Meters", v2.PolicyRuleRequest{Path: "meters/**", Verbs: reads})
	partners := policy("Partners and mail", v2.PolicyRuleRequest{Path: "partners/**", Verbs: []v2.PathVerb{v2.PathVerbList, v2.PathVerbRead, v2.PathVerbWrite}}, v2.PolicyRuleRequest{Path: "mail/smtp-relay", Verbs: reads})
	members, err := o.ListMembers(ctx)
	if err != nil {
		e.t.Fatal(err)
	}
	for _, m := range members.Members {
		if m.Role == v2.RoleMember {
			e.must(o.BindPolicies(ctx, m.UserId, v2.BindingRequest{Policies: []string{meters}}))
			priya := owner{e.newClient(), string(m.Email), "another quite long password"}
			e.must(priya.Login(ctx, v2.LoginRequest{Email: priya.email, Password: priya.password}))
			e.must(priya.UnsealCredential(ctx, e.meter))
		}
	}
	group, err := o.CreateGroup(ctx, v2.GroupRequest{Name: "Grid team"})
	if err != nil {
		e.t.Fatal(err)
	}
	for _, m := range members.Members {
		if m.Role == v2.RoleMember {
			e.must(o.AddGroupMember(ctx, group.Group.GroupId, m.UserId))
		}
	}
	e.must(o.AddGroupMember(ctx, group.Group.GroupId, "system:serviceaccount:grid:forecast"))
	e.must(o.BindPolicies(ctx, group.Group.GroupId, v2.BindingRequest{Policies: []string{partners}}))
	hook, err := o.CreateWebhook(ctx, v2.WebhookRequest{Url: "https://127.0.0.1:1025/services/T0", Description: new("On-call channel")})
	if err != nil {
		e.t.Fatal(err)
	}
	e.webhook = hook.Webhook.WebhookId
	e.must(o.TestWebhook(ctx, e.webhook))
	e.must(o.PutHistoryRule(ctx, v2.HistoryRuleRequest{Path: "meters/**", VersionsKept: 5}))
	e.must(o.ChangeSettings(ctx, v2.SettingsRequest{NeverExpiresPaths: &[]string{"backup/**"}}))
}

// view is a page, or what is seen on it after something was done.
type view struct {
	name, address string
	signedOut     bool
	do            func(b *tab)
}

// views are all pages and what opens on them.
func (e *estate) views() []view {
	press := func(names ...string) func(*tab) {
		return func(b *tab) {
			for _, n := range names {
				b.press(n)
			}
		}
	}
	return []view{
		{name: "sign-in", address: "/sign-in", signedOut: true},
		{name: "register", address: "/register", signedOut: true},
		{name: "verify", address: "/verify#token=x", signedOut: true},
		{name: "forgot", address: "/forgot", signedOut: true},
		{name: "reset", address: "/reset#token=x", signedOut: true},
		{name: "join", address: "/join#token=x", signedOut: true},
		{name: "overview", address: "/"},
		{name: "vault", address: "/vault"},
		{name: "vault-folder", address: "/vault?folder=meters%2F"},
		{name: "vault-sorted", address: "/vault?sort=last_read"},
		{name: "vault-new", address: "/vault/new", do: func(b *tab) {
			b.fill("Name", "grid-forecast/model-store")
			b.fill("Key", "access_key")
			b.fill("Value", "three words apart")
			b.press("Add a value")
		}},
		{name: "credential", address: "/vault/" + e.credential, do: func(b *tab) {
			b.press("Read values")
			b.press("Show secret_key")
		}},
		{name: "credential-edit", address: "/vault/" + e.credential, do: func(b *tab) {
			b.press("Edit values")
			b.fill("Value", "sk_live_another")
			b.press("Review changes")
			b.press("Show the change of secret_key")
		}},
		{name: "credential-delete", address: "/vault/" + e.credential, do: press("Delete")},
		{name: "crypto", address: "/crypto", do: func(b *tab) {
			b.fill("Text", "Meter 4711 reads 20,341 kWh.")
			b.fill("Key (optional)", e.key)
			b.press("Encrypt")
			b.sees("The envelope")
			b.sees("…" + e.key[len(e.key)-6:])
		}},
		{name: "crypto-decrypt", address: "/crypto?do=decrypt"},
		{name: "crypto-sign", address: "/crypto?do=sign"},
		{name: "crypto-verify", address: "/crypto?do=verify"},
		{name: "keys", address: "/keys"},
		{name: "key", address: "/keys/" + e.key},
		{name: "compliance", address: "/compliance"},
		{name: "framework", address: "/compliance/soc2"},
		{name: "report", address: "/compliance/report?framework=fedramp", do: func(b *tab) {
			b.press("Make the PDF report")
			b.sees("Links expire in 60 minutes")
		}},
		{name: "audit", address: "/audit", do: func(b *tab) {
			b.press("Verify this page")
			b.sees("entries verified")
		}},
		{name: "audit-entry", address: fmt.Sprint("/audit/", e.entry), do: func(b *tab) {
			b.press("Verify in this browser")
			b.sees("This entry is what was written")
		}},
		{name: "cluster", address: "/cluster"},
		{name: "cluster-details", address: "/cluster", do: press("Details of session-key in portal")},
		{name: "cluster-seal", address: "/cluster/seal"},
		{name: "cluster-seal-pasted", address: "/cluster/seal", do: func(b *tab) {
			b.press("Paste a Secret")
			b.fill("A Kubernetes Secret, as YAML or JSON", "apiVersion: v1\nkind: Secret\nmetadata:\n  name: meters\n  namespace: billing\n  labels: {app: meters, kubernetes.io/x: odd}\n"+
				"data:\n  keystore.p12: MIIKAA//\nstringData:\n  username: meters\n  password: kT9-velour-hazel\n")
			b.press("Use this Secret")
			b.sees("bytes, which are sealed as they are")
		}},
		{name: "settings-api-keys", address: "/settings/api-keys"},
		{name: "settings-api-keys-new", address: "/settings/api-keys", do: press("Create an API key")},
		{name: "settings-members", address: "/settings/members"},
		{name: "settings-policies", address: "/settings/policies", do: func(b *tab) {
			b.choose("Who is it", "priya.raman@nordwind.example")
			b.fill("On the path", "payments/stripe")
			b.press("Check")
			b.sees("No policy that is bound")
		}},
		{name: "settings-policies-change", address: "/settings/policies", do: func(b *tab) {
			b.press("Change Meters")
			b.fill("Path", "meters/timescale-replica")
			b.press("Who would lose what")
			b.sees("1 loss")
		}},
		{name: "settings-policies-bind", address: "/settings/policies", do: press("Bind policies")},
		{name: "settings-groups", address: "/settings/groups"},
		{name: "settings-groups-members", address: "/settings/groups", do: press("Members of Grid team")},
		{name: "settings-webhooks", address: "/settings/webhooks?webhook=" + e.webhook, do: func(b *tab) { b.sees("webhook.test") }},
		{name: "settings-webhooks-new", address: "/settings/webhooks", do: press("Create a webhook")},
		{name: "settings-rules", address: "/settings/rules"},
		{name: "settings-profile", address: "/settings/profile"},
		{name: "settings-password", address: "/settings/password"},
		{name: "settings-sessions", address: "/settings/sessions"},
		{name: "settings-plan", address: "/settings/plan"},
	}
}

// looks are the ways in which each view is looked at. Two of them have both of the colours and both of the widths, which are held against
// the rules by every test; the others are when pictures are taken.
var looks = []struct {
	scheme, name  string
	width, height int64
	axe           bool
}{
	{"light", "wide", 1280, 800, true}, {"dark", "wide", 1280, 800, false}, {"dark", "phone", 390, 844, true}, {"light", "phone", 390, 844, false},
}

// picturesTo names the folder that takes a picture of each view; without it none is taken.
const picturesTo = "DASHBOARD_PICTURES"

// Every page can be used by everybody, in light and dark, on a desk and on a phone.
func TestEveryPageIsAccessibleEverywhere(t *testing.T) {
	e := newEstate(t)
	b := e.tab()
	stop := b.answer("GET", "/api/v2/cluster/sealed-credentials*", reply{status: 200, body: e.cluster()})
	defer stop()
	inside := false
	for _, v := range e.views() {
		t.Run(v.name, func(t *testing.T) {
			b.t = t
			b.size(looks[0].width, looks[0].height)
			b.prefer("prefers-color-scheme", looks[0].scheme)
			if !v.signedOut && !inside {
				b.signIn(e.owner, "/")
				inside = true
			}
			b.open(v.address)
			b.settled()
			if v.do != nil {
				v.do(b)
				b.settled()
			}
			for _, look := range looks {
				b.size(look.width, look.height)
				b.prefer("prefers-color-scheme", look.scheme)
				b.until(fmt.Sprintf(`document.documentElement.clientWidth === %d && matchMedia('(prefers-color-scheme: %s)').matches`, look.width, look.scheme))
				b.narrow()
				if look.axe || os.Getenv(picturesTo) != "" {
					b.accessible()
				}
				b.picture(v.name + "-" + look.scheme + "-" + look.name)
			}
		})
	}
	b.t = t
}

// narrow fails the test if one has to scroll sideways to read the page.
func (b *tab) narrow() {
	b.t.Helper()
	wide := value[[]string](b, `document.documentElement.scrollWidth <= document.documentElement.clientWidth ? [] : ['the page as a whole', ...[...document.querySelectorAll('body *')]
		.filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1).slice(0, 5).map(e => e.outerHTML.slice(0, 200))]`)
	for _, element := range wide {
		b.t.Errorf("%s is wider than the screen of %d: %s", b.path(), value[int](b, `document.documentElement.clientWidth`), element)
	}
}

// picture takes a picture of what is on the screen.
func (b *tab) picture(name string) {
	b.t.Helper()
	folder := os.Getenv(picturesTo)
	if folder == "" {
		return
	}
	b.script(`scrollTo(0, 0)`)
	b.until(`!document.querySelector('.messages p')`) // what was said last has gone
	b.script(`new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))`)
	shot := ask(b, page.CaptureScreenshot, page.CaptureScreenshotParams{Format: page.CaptureScreenshotFormatPng})
	drawn, err := png.Decode(bytes.NewReader(shot.Data))
	if err != nil {
		b.t.Fatal(err)
	}
	var packed bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&packed, fewColours(drawn)); err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, name+".png"), packed.Bytes(), 0o644); err != nil {
		b.t.Fatal(err)
	}
}

// fewColours is a picture in 16 colours, four bits a pixel: the pages have few, and what is between them, at the edges of letters, is near
// one of them.
func fewColours(picture image.Image) *image.Paletted {
	const most = 32
	few := func(c color.Color) color.RGBA { // shades that nobody tells apart are one
		r, g, b, _ := c.RGBA()
		near := func(v uint32) uint8 { return uint8(min(255, (v>>8+2)/5*5)) }
		return color.RGBA{near(r), near(g), near(b), 255}
	}
	count, exact := map[color.RGBA]int{}, map[color.RGBA]map[color.RGBA]int{}
	bounds := picture.Bounds()
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		for x := bounds.Min.X; x < bounds.Max.X; x++ {
			c := color.RGBAModel.Convert(picture.At(x, y)).(color.RGBA)
			f := few(c)
			if count[f]++; exact[f] == nil {
				exact[f] = map[color.RGBA]int{}
			}
			exact[f][c]++
		}
	}
	palette := make(color.Palette, 0, most)
	for len(palette) < most && len(count) > 0 {
		// The next colour is the one that the most pixels are furthest from the colours there are.
		var next color.RGBA
		best := -1.0
		for c, n := range count {
			distance := 1.0
			if len(palette) > 0 {
				distance = apart(palette[palette.Index(c)], c)
			}
			if worth := float64(n) * distance; worth > best || worth == best && before(c, next) {
				best, next = worth, c
			}
		}
		whole, most := next, 0
		for c, n := range exact[next] {
			if n > most || n == most && before(c, whole) {
				whole, most = c, n
			}
		}
		palette = append(palette, whole)
		delete(count, next)
	}
	result := image.NewPaletted(bounds, palette)
	draw.Draw(result, bounds, picture, bounds.Min, draw.Src)
	return result
}

// apart is the square of how far two colours are from each other.
func apart(a, b color.Color) float64 {
	r1, g1, b1, _ := a.RGBA()
	r2, g2, b2, _ := b.RGBA()
	square := func(x, y uint32) float64 { d := float64(x>>8) - float64(y>>8); return d * d }
	return square(r1, r2) + square(g1, g2) + square(b1, b2)
}

func before(a, b color.RGBA) bool {
	return bytes.Compare([]byte{a.R, a.G, a.B}, []byte{b.R, b.G, b.B}) < 0
}
