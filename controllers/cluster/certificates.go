package cluster

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/controllers/requeue"
)

// The operator reads and writes the Secrets one by one, with the rights that targets need. The
// webhook configuration needs a role of its own to patch one field. Only deployments where the
// operator makes the certificates have this role.
//
// +kubebuilder:rbac:roleName=latticekeep-certificates,groups=admissionregistration.k8s.io,resources=validatingwebhookconfigurations,verbs=get;patch,resourceNames=latticekeep-webhook

// Certificate is a serving certificate that the operator makes and renews.
type Certificate struct {
	SecretName string   // holds tls.crt, tls.key and ca.crt, in the operator's namespace
	DNSNames   []string // at least one
	// WebhookConfiguration names the ValidatingWebhookConfiguration whose webhooks trust the
	// certificate; "" for none.
	WebhookConfiguration string
}

// authoritySecret holds the certificate and key of the certificate authority, and all trusted
// authorities as ca.crt. No pod mounts it.
const authoritySecret = "latticekeep-ca"

const (
	authorityLife   = 365 * 24 * time.Hour
	certificateLife = 90 * 24 * time.Hour
	// authoritySettleTime is how long a new authority is trusted before it signs routine renewals.
	// Kubelets copy ca.crt to pods within minutes, and people copy it to other places within a day.
	authoritySettleTime = 24 * time.Hour
	// clockSkew is how far the clocks of other machines may be behind.
	clockSkew = time.Hour
	// maxAuthorities bounds the number of trusted authorities if someone keeps removing the
	// authority.
	maxAuthorities = 8
	// certificateInterval is the time between two passes, and so the delay of a repair.
	certificateInterval = 10 * time.Second
)

const (
	managedByLabel = "app.kubernetes.io/managed-by"
	caCertKey      = corev1.ServiceAccountRootCAKey // ca.crt
)

// certificates makes and renews serving certificates, and keeps webhooks trusting them.
//
// It renews everything at two thirds of its life. It renews the authority before the certificates
// that the authority signed expire, and trusts the previous authority until that expires. So at
// every moment, a client with that day's bundle trusts every certificate in use. A new authority is
// published as trusted before certificates that it signed are used.
//
// A pass compares the current state with the wanted state and writes the differences, provided that
// the object has not changed since it was read. It remembers nothing between passes. It reads a few
// objects by name at a fixed interval instead of watching them, so it needs no right to list
// Secrets. It never changes a Secret that someone else made.
type certificates struct {
	live      client.Reader // reads from the API server, not from the cache
	client    client.Client
	namespace string
	wanted    []Certificate
	now       func() time.Time
}

// AddCertificates adds the runnable that makes and renews certificates. It adds nothing if none are
// wanted.
func AddCertificates(mgr manager.Manager, namespace string, wanted []Certificate, now func() time.Time) error {
	if len(wanted) == 0 {
		return nil
	}
	for _, w := range wanted {
		if len(w.DNSNames) == 0 {
			return fmt.Errorf("a certificate for Secret %s serves one name at least", w.SecretName)
		}
		for _, name := range w.DNSNames { // a certificate for an invalid name would be renewed at every pass
			if len(validation.IsDNS1123Subdomain(name)) > 0 {
				return fmt.Errorf("the certificate of Secret %s cannot serve %q, which is no DNS name", w.SecretName, name)
			}
		}
	}
	if err := admissionregistrationv1.AddToScheme(mgr.GetScheme()); err != nil {
		return err
	}
	c := &certificates{live: mgr.GetAPIReader(), client: mgr.GetClient(), namespace: namespace, wanted: wanted, now: now}
	return mgr.Add(manager.RunnableFunc(c.run))
}

// run makes passes until ctx ends.
func (c *certificates) run(ctx context.Context) error {
	logger := log.FromContext(ctx).WithName("certificates")
	ctx = log.IntoContext(ctx, logger)
	told, retry := "", requeue.FirstRetry
	for {
		wait := certificateInterval
		if err := c.ensureAll(ctx); ctx.Err() != nil {
			return nil
		} else if err == nil {
			told, retry = "", requeue.FirstRetry
		} else {
			if told != err.Error() { // log each error only once
				logger.Error(err, "not all certificates are as they should be; retrying")
				told = err.Error()
			}
			wait, retry = retry, min(2*retry, requeue.LastRetry)
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil
		}
	}
}

// ensureAll makes one pass over the authority, the certificates and the webhook configurations.
func (c *certificates) ensureAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requeue.Timeout)
	defer cancel()
	own, err := c.read(ctx, authoritySecret)
	if err != nil {
		return err
	}
	former := parseAuthorities(own.Data[caCertKey], c.now())
	lost := len(former) == 0
	var errs []error
	served := make(map[string]*corev1.Secret)
	for _, w := range c.wanted {
		s, err := c.read(ctx, w.SecretName)
		if err != nil { // the other certificates are still renewed
			errs = append(errs, err)
			continue
		}
		served[w.SecretName] = s
		// When the authority is lost, these bundles still name the authorities that signed the
		// certificates in use. Use them only then: more pods and people can write these Secrets
		// than that of the authority.
		if lost {
			former = append(former, parseAuthorities(s.Data[caCertKey], c.now())...)
		}
	}
	ca, err := c.authority(ctx, own, former)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	for _, w := range c.wanted {
		if s := served[w.SecretName]; s != nil {
			errs = append(errs, c.ensureTrust(ctx, w.WebhookConfiguration, ca.trusted), c.ensureServing(ctx, w, s, ca))
		}
	}
	return errors.Join(errs...)
}

// authority is the certificate authority that signs serving certificates.
type authority struct {
	cert    *x509.Certificate
	key     *ecdsa.PrivateKey
	trusted []byte // this and previous authorities, in PEM
}

// authority returns the authority in its Secret, and makes or renews it if necessary.
func (c *certificates) authority(ctx context.Context, s *corev1.Secret, former []*x509.Certificate) (*authority, error) {
	now, ca := c.now(), parseAuthority(s)
	if ca == nil || now.Before(ca.cert.NotBefore) || now.After(renewalTime(ca.cert)) {
		var err error
		if ca, err = newAuthority(now); err != nil {
			return nil, fmt.Errorf("making a certificate authority: %w", err)
		}
		log.FromContext(ctx).Info("there is a new certificate authority", "until", ca.cert.NotAfter)
	}
	ca.trusted = encodeBundle(ca.cert, former)
	cert, key, err := encodePair(ca.cert.Raw, ca.key)
	if err != nil {
		return nil, err
	}
	return ca, c.write(ctx, s, cert, key, ca.trusted)
}

// parseAuthority returns the authority in a Secret. It returns nil unless certificate and key are
// intact and belong together, and the authority lives no longer than one that newAuthority makes.
func parseAuthority(s *corev1.Secret) *authority {
	pair, err := tls.X509KeyPair(s.Data[corev1.TLSCertKey], s.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return nil
	}
	key, ok := pair.PrivateKey.(*ecdsa.PrivateKey)
	if !ok || !pair.Leaf.IsCA || pair.Leaf.NotAfter.Sub(pair.Leaf.NotBefore) > authorityLife+clockSkew {
		return nil
	}
	return &authority{cert: pair.Leaf, key: key}
}

// ensureServing renews the certificate in a Secret if necessary, and writes the trusted
// authorities.
func (c *certificates) ensureServing(ctx context.Context, w Certificate, s *corev1.Secret, ca *authority) error {
	now := c.now()
	cert, key := s.Data[corev1.TLSCertKey], s.Data[corev1.TLSPrivateKeyKey]
	current := verifiedPair(cert, key, w.DNSNames, ca.trusted, now)
	settled := now.Sub(ca.cert.NotBefore) >= clockSkew+authoritySettleTime
	if current == nil || now.After(renewalTime(current)) && settled {
		var err error
		if cert, key, err = ca.issue(w.DNSNames, now); err != nil {
			return fmt.Errorf("issuing the certificate of Secret %s: %w", w.SecretName, err)
		}
		log.FromContext(ctx).Info("a certificate is renewed", "secret", w.SecretName)
	}
	return c.write(ctx, s, cert, key, ca.trusted)
}

// verifiedPair returns the certificate of a pair. It returns nil unless the certificate serves
// exactly names, and verifies against the authorities in trusted.
func verifiedPair(cert, key []byte, names []string, trusted []byte, now time.Time) *x509.Certificate {
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil || !slices.Equal(pair.Leaf.DNSNames, names) {
		return nil
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(trusted)
	for _, name := range names {
		if _, err := pair.Leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: roots, CurrentTime: now}); err != nil {
			return nil
		}
	}
	return pair.Leaf
}

// ensureTrust makes all webhooks of a configuration trust bundle. It ignores a missing
// configuration: an installation without a webhook has none.
func (c *certificates) ensureTrust(ctx context.Context, name string, bundle []byte) error {
	if name == "" {
		return nil
	}
	config := new(admissionregistrationv1.ValidatingWebhookConfiguration)
	if err := c.live.Get(ctx, client.ObjectKey{Name: name}, config); apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("reading webhook configuration %s: %w", name, err)
	}
	before := config.DeepCopy()
	changed := false
	for i := range config.Webhooks {
		if to := &config.Webhooks[i].ClientConfig; !bytes.Equal(to.CABundle, bundle) {
			to.CABundle, changed = bundle, true
		}
	}
	if !changed {
		return nil
	}
	// The patch merges webhooks by name, so fields that a newer API server has added stay.
	patch := client.StrategicMergeFrom(before, client.MergeFromWithOptimisticLock{})
	if err := c.client.Patch(ctx, config, patch, client.FieldOwner(v1beta1.OperatorName)); err != nil {
		return fmt.Errorf("writing webhook configuration %s: %w", name, err)
	}
	log.FromContext(ctx).Info("a webhook configuration has the authorities of now", "name", name)
	return nil
}

// read returns a Secret that the operator made, or an empty one if it is missing. It returns an
// error for a Secret that someone else made.
func (c *certificates) read(ctx context.Context, name string) (*corev1.Secret, error) {
	s := new(corev1.Secret)
	err := c.live.Get(ctx, client.ObjectKey{Namespace: c.namespace, Name: name}, s)
	if apierrors.IsNotFound(err) {
		return &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: name, Labels: map[string]string{managedByLabel: v1beta1.OperatorName}},
			Type:       corev1.SecretTypeTLS,
		}, nil
	} else if err != nil {
		return nil, fmt.Errorf("reading Secret %s: %w", name, err)
	}
	if s.Labels[managedByLabel] != v1beta1.OperatorName {
		return nil, fmt.Errorf("a Secret %s is there and was not made by the operator, which leaves it alone: "+
			"delete it to have another one made, or leave the certificate to whoever made it", name)
	}
	return s, nil
}

// write stores a pair and the trusted authorities in s, unless they are already there. It fails if
// s has changed since it was read.
func (c *certificates) write(ctx context.Context, s *corev1.Secret, cert, key, trusted []byte) error {
	data := maps.Clone(s.Data)
	if data == nil {
		data = make(map[string][]byte)
	}
	data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey], data[caCertKey] = cert, key, trusted
	if maps.EqualFunc(data, s.Data, bytes.Equal) {
		return nil
	}
	s.Data = data
	var err error
	if s.ResourceVersion == "" {
		err = c.client.Create(ctx, s, client.FieldOwner(v1beta1.OperatorName))
	} else {
		err = c.client.Update(ctx, s, client.FieldOwner(v1beta1.OperatorName))
	}
	if err != nil {
		return fmt.Errorf("writing Secret %s: %w", s.Name, err)
	}
	return nil
}

func renewalTime(c *x509.Certificate) time.Time {
	return c.NotBefore.Add(c.NotAfter.Sub(c.NotBefore) * 2 / 3)
}

// parseAuthorities returns the authorities in bundle that have not expired and expire no later than
// one made now would. It skips anything else.
func parseAuthorities(bundle []byte, now time.Time) (list []*x509.Certificate) {
	last := now.Add(authorityLife + clockSkew)
	for {
		var block *pem.Block
		if block, bundle = pem.Decode(bundle); block == nil {
			return list
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err == nil && cert.IsCA && cert.Subject.CommonName == authorityName && now.Before(cert.NotAfter) && !cert.NotAfter.After(last) {
			list = append(list, cert)
		}
	}
}

// encodeBundle returns in PEM the newest authority, followed by the previous ones, newest first.
func encodeBundle(newest *x509.Certificate, former []*x509.Certificate) []byte {
	slices.SortStableFunc(former, func(a, b *x509.Certificate) int { return b.NotAfter.Compare(a.NotAfter) })
	all := []*x509.Certificate{newest}
	for _, f := range former {
		if len(all) < maxAuthorities && !slices.ContainsFunc(all, f.Equal) {
			all = append(all, f)
		}
	}
	var text []byte
	for _, a := range all {
		text = append(text, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Raw})...)
	}
	return text
}

const authorityName = "latticekeep CA"

func newAuthority(now time.Time) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		Subject:   pkix.Name{CommonName: authorityName},
		NotBefore: now.Add(-clockSkew), NotAfter: now.Add(authorityLife),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &authority{cert: cert, key: key}, nil
}

// issue returns a new certificate for names and its key, in PEM.
func (a *authority) issue(names []string, now time.Time) (cert, key []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	template := &x509.Certificate{
		DNSNames:  names,
		NotBefore: now.Add(-clockSkew), NotAfter: now.Add(certificateLife),
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, private.Public(), a.key)
	if err != nil {
		return nil, nil, err
	}
	return encodePair(der, private)
}

func encodePair(der []byte, private *ecdsa.PrivateKey) (cert, key []byte, err error) {
	b, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return nil, nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: b}), nil
}
