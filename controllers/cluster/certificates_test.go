package cluster

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/latticekeep/latticekeep/test/kubetest"
)

// office is a cluster in which certificates are made, by somebody with exactly the rights that takes.
type office struct {
	t     *testing.T
	admin client.Client
	own   client.WithWatch
	now   time.Time
	*certificates
}

const webhooks = "latticekeep-webhook" // the webhook's configuration

const day = 24 * time.Hour

func newOffice(t *testing.T, plane *kubetest.ControlPlane, namespace string) *office {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, rbacv1.AddToScheme, admissionregistrationv1.AddToScheme} {
		check(t, add(scheme))
	}
	connect := func(kubeconfig string) client.WithWatch {
		cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
		check(t, err)
		cfg.QPS = -1
		c, err := client.NewWithWatch(cfg, client.Options{Scheme: scheme})
		check(t, err)
		return c
	}
	user := "system:serviceaccount:" + namespace + ":latticekeep"
	kubeconfig, err := plane.KubeconfigFor(user)
	check(t, err)
	o := &office{t: t, admin: connect(plane.Kubeconfig), own: connect(kubeconfig), now: time.Now().Truncate(time.Second)}
	served := []string{"latticekeep-tls", "latticekeep-webhook-tls"}
	subjects := []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: user}}
	role := metav1.ObjectMeta{Namespace: namespace, Name: "certificates"}
	for _, object := range []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}},
		&rbacv1.Role{ObjectMeta: role, Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get", "update"}, ResourceNames: append(served, authoritySecret)},
			{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"create"}},
		}},
		&rbacv1.RoleBinding{ObjectMeta: role, Subjects: subjects, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role.Name}},
		&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: namespace}, Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{admissionregistrationv1.GroupName}, Resources: []string{"validatingwebhookconfigurations"}, Verbs: []string{"get", "patch"},
				ResourceNames: []string{webhooks}},
		}},
		&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: namespace}, Subjects: subjects,
			RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: namespace}},
	} {
		check(t, o.admin.Create(t.Context(), object))
	}
	o.certificates = &certificates{
		live: o.own, client: o.own, namespace: namespace, now: func() time.Time { return o.now },
		wanted: []Certificate{
			{SecretName: served[0], DNSNames: []string{"latticekeep." + namespace + ".svc", "vault.example.org"}},
			{SecretName: served[1], DNSNames: []string{"latticekeep-webhook." + namespace + ".svc"}, WebhookConfiguration: webhooks},
		},
	}
	return o
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// configure makes the webhooks' configuration, without any authority.
func (o *office) configure() {
	o.t.Helper()
	config := &admissionregistrationv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: webhooks}}
	for _, name := range []string{"one", "two"} {
		none, ignore, path := admissionregistrationv1.SideEffectClassNone, admissionregistrationv1.Ignore, "/validate"
		config.Webhooks = append(config.Webhooks, admissionregistrationv1.ValidatingWebhook{
			Name: name + ".latticekeep.dev", AdmissionReviewVersions: []string{"v1"}, SideEffects: &none, FailurePolicy: &ignore,
			ClientConfig: admissionregistrationv1.WebhookClientConfig{
				Service: &admissionregistrationv1.ServiceReference{Namespace: o.namespace, Name: "latticekeep-webhook", Path: &path},
			},
			Rules: []admissionregistrationv1.RuleWithOperations{{
				Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Create},
				Rule:       admissionregistrationv1.Rule{APIGroups: []string{"example.org"}, APIVersions: []string{"v1"}, Resources: []string{"things"}},
			}},
		})
	}
	check(o.t, o.admin.Create(o.t.Context(), config))
}

func (o *office) pass() {
	o.t.Helper()
	check(o.t, o.certificates.ensureAll(o.t.Context()))
}

func (o *office) secret(name string) *corev1.Secret {
	o.t.Helper()
	s := new(corev1.Secret)
	check(o.t, o.admin.Get(o.t.Context(), client.ObjectKey{Namespace: o.namespace, Name: name}, s))
	return s
}

func (o *office) bundle() []byte {
	o.t.Helper()
	config := new(admissionregistrationv1.ValidatingWebhookConfiguration)
	check(o.t, o.admin.Get(o.t.Context(), client.ObjectKey{Name: webhooks}, config))
	if !bytes.Equal(config.Webhooks[0].ClientConfig.CABundle, config.Webhooks[1].ClientConfig.CABundle) {
		o.t.Error("the webhooks differ")
	}
	return config.Webhooks[0].ClientConfig.CABundle
}

func leafOf(t *testing.T, s *corev1.Secret) *x509.Certificate {
	t.Helper()
	pair, err := tls.X509KeyPair(s.Data["tls.crt"], s.Data["tls.key"])
	check(t, err)
	return pair.Leaf
}

// trusts reports whether who has the bundle takes the certificate for all of its names.
func trusts(bundle []byte, leaf *x509.Certificate, now time.Time) error {
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(bundle)
	var errs []error
	for _, name := range leaf.DNSNames {
		_, err := leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: roots, CurrentTime: now})
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// checkAll holds everything against what was wanted.
func (o *office) checkAll() {
	o.t.Helper()
	trusted := o.bundle()
	for _, w := range o.wanted {
		s := o.secret(w.SecretName)
		leaf := leafOf(o.t, s)
		if err := trusts(trusted, leaf, o.now); err != nil || !slices.Equal(leaf.DNSNames, w.DNSNames) || leaf.IsCA {
			o.t.Errorf("%s: %v, for %v", w.SecretName, err, leaf.DNSNames)
		}
		if s.Type != corev1.SecretTypeTLS || !bytes.Equal(s.Data["ca.crt"], trusted) || len(s.Data) != 3 {
			o.t.Errorf("%s has %s and %v", w.SecretName, s.Type, slices.Collect(maps.Keys(s.Data)))
		}
		if bytes.Equal(s.Data["tls.key"], o.secret(authoritySecret).Data["tls.key"]) {
			o.t.Error("a pod is given the authority's key")
		}
	}
}

// versions are those of everything.
func (o *office) versions() string {
	o.t.Helper()
	config := new(admissionregistrationv1.ValidatingWebhookConfiguration)
	check(o.t, o.admin.Get(o.t.Context(), client.ObjectKey{Name: webhooks}, config))
	all := config.ResourceVersion
	for _, name := range []string{authoritySecret, "latticekeep-tls", "latticekeep-webhook-tls"} {
		all += " " + o.secret(name).ResourceVersion
	}
	return all
}

func TestCertificates(t *testing.T) {
	plane := kubetest.ForTest(t)
	n := 0
	// Each in a namespace of its own, with a new configuration.
	in := func(t *testing.T) *office {
		t.Helper()
		n++
		o := newOffice(t, plane, fmt.Sprintf("keep-%d", n))
		o.configure()
		t.Cleanup(func() {
			_ = o.admin.Delete(context.Background(), &admissionregistrationv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: webhooks}})
		})
		return o
	}

	t.Run("are made, and then nothing is written", func(t *testing.T) {
		o := in(t)
		o.pass()
		o.checkAll()
		before := o.versions()
		for range 3 {
			o.now = o.now.Add(day)
			o.pass()
		}
		if after := o.versions(); before != after {
			t.Errorf("%s, then %s", before, after)
		}
	})

	// Day by day for two years: whoever took the bundle a day ago trusts what is served today, and who has today's bundle
	// trusts what a pod that is a day behind still serves.
	t.Run("are renewed without a moment of distrust", func(t *testing.T) {
		o := in(t)
		o.pass()
		leaf := func() *x509.Certificate { return leafOf(t, o.secret("latticekeep-webhook-tls")) }
		trusted, served, ca := o.bundle(), leaf(), leafOf(t, o.secret(authoritySecret))
		leaves, cas := 1, 1
		for range 2 * 365 {
			o.now = o.now.Add(day)
			o.pass()
			newTrusted, newServed, newCA := o.bundle(), leaf(), leafOf(t, o.secret(authoritySecret))
			if err := errors.Join(trusts(trusted, newServed, o.now), trusts(newTrusted, served, o.now), trusts(newTrusted, newServed, o.now)); err != nil {
				t.Fatalf("on %s: %v", o.now, err)
			}
			if !newServed.Equal(served) {
				leaves++
				if age := o.now.Sub(served.NotBefore); age < 60*day || age > 63*day {
					t.Errorf("renewed after %s", age)
				}
			}
			if !newCA.Equal(ca) {
				cas++
				if !newServed.Equal(served) || strings.Count(string(newTrusted), "BEGIN") != 2 {
					t.Error("the new authority signs at once, or the former one is not trusted")
				}
			}
			trusted, served, ca = newTrusted, newServed, newCA
		}
		if leaves < 12 || leaves > 14 || cas != 3 {
			t.Errorf("%d certificates of %d authorities", leaves, cas)
		}
		if n := strings.Count(string(trusted), "BEGIN"); n > 2 {
			t.Errorf("%d authorities are trusted", n)
		}
		o.checkAll()
	})

	// When a certificate is due at the moment in which the authority is, it waits until the new one is known.
	t.Run("are not signed by an authority that nobody knows yet", func(t *testing.T) {
		o := in(t)
		leaf := func() *x509.Certificate { return leafOf(t, o.secret("latticekeep-webhook-tls")) }
		for range 4 { // on days 0, 61, 122 and 183
			o.pass()
			o.now = o.now.Add(61 * day)
		}
		before, trusted := leaf(), o.bundle()
		for _, then := range []struct {
			in      time.Duration
			renewed bool
		}{{0, false}, {23 * time.Hour, false}, {time.Hour, true}} {
			o.now = o.now.Add(then.in)
			o.pass()
			if n := strings.Count(string(o.bundle()), "BEGIN"); n != 2 {
				t.Fatalf("%d authorities are trusted: the test proves nothing", n)
			}
			if renewed := !leaf().Equal(before); renewed != then.renewed {
				t.Errorf("after %s it is renewed: %t", then.in, renewed)
			}
		}
		if trusts(trusted, leaf(), o.now) == nil {
			t.Error("the former authority signs on")
		}
		o.checkAll()
	})

	t.Run("are repaired", func(t *testing.T) {
		o := in(t)
		o.pass()
		damage := func(name, key, value string) func() {
			return func() {
				s := o.secret(name)
				s.Data[key] = []byte(value)
				check(t, o.admin.Update(t.Context(), s))
			}
		}
		remove := func(name string) func() { return func() { check(t, o.admin.Delete(t.Context(), o.secret(name))) } }
		distrust := func(bundle []byte) func() {
			return func() {
				config := new(admissionregistrationv1.ValidatingWebhookConfiguration)
				check(t, o.admin.Get(t.Context(), client.ObjectKey{Name: webhooks}, config))
				for i := range config.Webhooks {
					config.Webhooks[i].ClientConfig.CABundle = bundle
				}
				check(t, o.admin.Update(t.Context(), config))
			}
		}
		const served = "latticekeep-webhook-tls"
		remove(authoritySecret)() // what is in use is of a former authority, as in every renewal
		o.pass()
		for name, c := range map[string]struct {
			damage func()
			same   bool // the certificate in use stays
		}{
			"a deleted certificate":      {remove(served), false},
			"a deleted authority":        {remove(authoritySecret), true},
			"all certificates deleted":   {func() { remove(served)(); remove("latticekeep-tls")() }, false},
			"both deleted":               {func() { remove(served)(); remove(authoritySecret)() }, false},
			"a certificate that is none": {damage(served, "tls.crt", "junk"), false},
			"a key that is none":         {damage(served, "tls.key", "junk"), false},
			"a key that is another's":    {damage(served, "tls.key", string(o.secret("latticekeep-tls").Data["tls.key"])), false},
			"a certificate for other names": {func() {
				damage(served, "tls.crt", string(o.secret("latticekeep-tls").Data["tls.crt"]))()
				damage(served, "tls.key", string(o.secret("latticekeep-tls").Data["tls.key"]))()
			}, false},
			"authorities that are none":          {damage(served, "ca.crt", "junk"), true},
			"an authority without a key":         {damage(authoritySecret, "tls.key", ""), true},
			"an authority that is none":          {damage(authoritySecret, "tls.crt", string(o.secret(served).Data["tls.crt"])), true},
			"authorities lost in their place":    {damage(authoritySecret, "ca.crt", "junk"), true},
			"a configuration that trusts nobody": {distrust(nil), true},
			"one that trusts somebody else": {func() {
				stranger, err := newAuthority(o.now)
				check(t, err)
				distrust(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: stranger.cert.Raw}))()
			}, true},
			"a new name": {func() { o.wanted[1].DNSNames = append(o.wanted[1].DNSNames, "added.example.org") }, false},
		} {
			t.Run(name, func(t *testing.T) {
				o.t = t
				before := leafOf(t, o.secret(served))
				c.damage()
				o.pass()
				o.checkAll()
				if same := leafOf(t, o.secret(served)).Equal(before); same != c.same {
					t.Errorf("the certificate stays: %t", same)
				}
				if err := trusts(o.bundle(), before, o.now); err != nil {
					t.Errorf("what a pod still serves is no longer trusted: %v", err)
				}
				before2 := o.versions()
				if o.pass(); o.versions() != before2 {
					t.Error("it is written again and again")
				}
			})
		}
		o.t = t
		for range 20 { // somebody keeps removing it
			remove(authoritySecret)()
			o.pass()
		}
		o.checkAll()
		if n := strings.Count(string(o.bundle()), "BEGIN"); n > maxAuthorities {
			t.Errorf("%d authorities are trusted", n)
		}
	})

	// Who can write a Secret that pods mount, or once wrote the authority's, has nobody trusted by that.
	t.Run("are of no authority that somebody else put there", func(t *testing.T) {
		o := in(t)
		o.pass()
		o.now = o.now.Add(day)
		stranger := func(from, to time.Time) (cert, key []byte) {
			made, err := newAuthority(o.now)
			check(t, err)
			template := *made.cert
			template.NotBefore, template.NotAfter = from, to
			der, err := x509.CreateCertificate(rand.Reader, &template, &template, made.key.Public(), made.key)
			check(t, err)
			cert, key, err = encodePair(der, made.key)
			check(t, err)
			return cert, key
		}
		add := func(name string, cert []byte) func() {
			return func() {
				s := o.secret(name)
				s.Data["ca.crt"] = append(s.Data["ca.crt"], cert...)
				check(t, o.admin.Update(t.Context(), s))
			}
		}
		year, _ := stranger(o.now, o.now.Add(authorityLife))
		decade, _ := stranger(o.now, o.now.Add(10*authorityLife))
		later, _ := stranger(o.now.Add(2*authorityLife), o.now.Add(3*authorityLife))
		const served = "latticekeep-webhook-tls"
		before := leafOf(t, o.secret(authoritySecret))
		for name, damage := range map[string]func(){
			"a serving Secret":                       add(served, year),
			"the authority's, for long":              add(authoritySecret, decade),
			"the authority's, from a time to come":   add(authoritySecret, later),
			"a serving Secret without the authority": func() { add(served, decade)(); check(t, o.admin.Delete(t.Context(), o.secret(authoritySecret))) },
		} {
			damage()
			o.pass()
			o.checkAll()
			for _, cert := range [][]byte{year, decade, later} {
				if bytes.Contains(o.bundle(), cert) || bytes.Contains(o.secret(authoritySecret).Data["ca.crt"], cert) {
					t.Errorf("%s: a stranger's authority is trusted", name)
				}
			}
			if !bytes.Contains(o.bundle(), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: before.Raw})) {
				t.Errorf("%s: the authority in use is not", name)
			}
		}
		s := o.secret(authoritySecret)
		s.Data["tls.crt"], s.Data["tls.key"] = stranger(o.now, o.now.Add(10*authorityLife))
		check(t, o.admin.Update(t.Context(), s))
		o.pass()
		o.checkAll()
		if leaf := leafOf(t, o.secret(authoritySecret)); leaf.NotAfter.Sub(leaf.NotBefore) > authorityLife+clockSkew {
			t.Error("an authority of ten years signs")
		}
	})

	t.Run("of others are left alone", func(t *testing.T) {
		o := in(t)
		foreign := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: o.namespace, Name: "latticekeep-tls"}, Type: corev1.SecretTypeTLS,
			Data: map[string][]byte{"tls.crt": []byte("a"), "tls.key": []byte("b")}}
		check(t, o.admin.Create(t.Context(), foreign))
		err := o.certificates.ensureAll(t.Context())
		if err == nil || !strings.Contains(err.Error(), "latticekeep-tls") || !strings.Contains(err.Error(), "delete it") {
			t.Error(err)
		}
		if s := o.secret("latticekeep-tls"); s.ResourceVersion != foreign.ResourceVersion {
			t.Error("it was written")
		}
		if err := trusts(o.bundle(), leafOf(t, o.secret("latticekeep-webhook-tls")), o.now); err != nil {
			t.Error("the other one is not made:", err)
		}
	})

	t.Run("need no webhook configuration", func(t *testing.T) {
		o := in(t)
		check(t, o.admin.Delete(t.Context(), &admissionregistrationv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: webhooks}}))
		o.pass()
		o.configure() // it comes later
		o.pass()
		o.checkAll()
	})

	// A process that ends at any write, or loses its answer, leaves nothing that the next one cannot go on from; and what a pod serves is
	// trusted at each moment.
	t.Run("survive an end at each write", func(t *testing.T) {
		ended := errors.New("the process has ended")
		for _, after := range []bool{false, true} {
			for at := 1; ; at++ {
				o := in(t)
				writes := 0
				step := func(do func() error) error {
					switch writes++; {
					case writes < at:
						return do()
					case writes == at && after:
						check(t, do())
					}
					return ended
				}
				o.client = interceptor.NewClient(o.own, interceptor.Funcs{
					Create: func(ctx context.Context, c client.WithWatch, object client.Object, opts ...client.CreateOption) error {
						return step(func() error { return c.Create(ctx, object, opts...) })
					},
					Update: func(ctx context.Context, c client.WithWatch, object client.Object, opts ...client.UpdateOption) error {
						return step(func() error { return c.Update(ctx, object, opts...) })
					},
					Patch: func(ctx context.Context, c client.WithWatch, object client.Object, patch client.Patch, opts ...client.PatchOption) error {
						return step(func() error { return c.Patch(ctx, object, patch, opts...) })
					},
				})
				err := o.certificates.ensureAll(t.Context())
				if s := new(corev1.Secret); o.admin.Get(t.Context(), client.ObjectKey{Namespace: o.namespace, Name: "latticekeep-webhook-tls"}, s) == nil {
					if err := trusts(o.bundle(), leafOf(t, s), o.now); err != nil {
						t.Errorf("at %d something is served that is not trusted yet: %v", at, err)
					}
				}
				o.client = o.own
				o.pass()
				o.checkAll()
				check(t, o.admin.Delete(t.Context(), &admissionregistrationv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: webhooks}}))
				if err == nil {
					if at != 5 {
						t.Errorf("%d writes, want 4: the authority, the configuration and two certificates", at-1)
					}
					break
				}
			}
		}
	})

	t.Run("of two operators are of one authority", func(t *testing.T) {
		o := in(t)
		var both sync.WaitGroup
		for range 2 {
			c := *o.certificates
			both.Go(func() {
				for range 10 { // a conflict is an error, and is tried again
					if err := c.ensureAll(t.Context()); err != nil && !apierrors.IsConflict(errors.Unwrap(err)) && !strings.Contains(err.Error(), "exists") &&
						!strings.Contains(err.Error(), "modified") {
						t.Error(err)
					}
				}
			})
		}
		both.Wait()
		o.pass()
		o.checkAll()
	})

	t.Run("cannot be made without the rights", func(t *testing.T) {
		o := in(t)
		role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: o.namespace, Name: "certificates"}}
		check(t, o.admin.Delete(t.Context(), role))
		if err := o.certificates.ensureAll(t.Context()); !apierrors.IsForbidden(err) {
			t.Error("the test proves nothing about RBAC:", err)
		}
	})
}
