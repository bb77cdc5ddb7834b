package kmstest

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
)

const (
	awsRegion  = "eu-central-1"
	awsAccount = "111122223333"
	awsKeyID   = "AKIDLATTICEKEEPTEST0"
)

// NewAWS starts a server with the API of AWS KMS (AWS JSON 1.1, signed with Signature Version 4). A
// key is addressed by its alias, as in URL, or by its ARN.
func NewAWS(options ...Option) (*Server, error) {
	secret := rand.Text()
	s, err := start(func(s *Server) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.aws(w, r, secret) })
	}, options)
	if err != nil {
		return nil, err
	}
	s.url = func(name string) string {
		return "awskms:///alias/" + name + "?region=" + awsRegion + "&endpoint=" + url.QueryEscape(s.base())
	}
	s.env = func() []string {
		return []string{"AWS_ACCESS_KEY_ID=" + awsKeyID, "AWS_SECRET_ACCESS_KEY=" + secret, "AWS_EC2_METADATA_DISABLED=true",
			"AWS_CONFIG_FILE=/dev/null", "AWS_SHARED_CREDENTIALS_FILE=/dev/null"}
	}
	s.AddKey(DefaultKey, "")
	return s, nil
}

// ARN returns the ARN of a key.
func (s *Server) ARN(name string) (arn string) {
	s.locked(func() { arn = s.keys[name].arn() })
	return arn
}

func (k *key) uuid() string {
	h := sha256.Sum256(k.versions[1])
	return fmt.Sprintf("%x-%x-%x-%x-%x", h[:4], h[4:6], h[6:8], h[8:10], h[10:16])
}

// id returns the key's id. Multi-region keys have another format.
func (k *key) id() string {
	if k.multiRegion {
		return "mrk-" + strings.ReplaceAll(k.uuid(), "-", "")
	}
	return k.uuid()
}

// SetMultiRegion makes a key one that may have replicas in other regions.
func (s *Server) SetMultiRegion(name string) { s.locked(func() { s.keys[name].multiRegion = true }) }

func (k *key) arn() string {
	return "arn:aws:kms:" + awsRegion + ":" + awsAccount + ":key/" + k.id()
}

// awsError is an error response with a type.
type awsError struct {
	status     int
	kind, text string
}

func (e *awsError) Error() string { return e.text }

func awsRefused(kind, text string) error { return &awsError{http.StatusBadRequest, kind, text} }

func (s *Server) aws(w http.ResponseWriter, r *http.Request, secret string) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 1<<20))
	if err != nil {
		return
	}
	target, ok := strings.CutPrefix(r.Header.Get("X-Amz-Target"), "TrentService.")
	if !ok || r.Method != http.MethodPost || r.URL.Path != "/" {
		answerAWS(w, nil, awsRefused("UnknownOperationException", ""))
		return
	}
	operation := strings.ToLower(target)
	switch target {
	case "DescribeKey":
		operation = "describe"
	case "ScheduleKeyDeletion":
		operation = "delete"
	}
	done, err := s.befall(r.Context(), operation)
	defer done()
	switch {
	case errors.Is(err, errDropped):
		hangUp(w)
		return
	case errors.Is(err, errThrottled):
		err = awsRefused("ThrottlingException", "Rate exceeded")
	case errors.Is(err, errFailing):
		err = &awsError{http.StatusInternalServerError, "KMSInternalException", ""}
	case errors.Is(err, errForbidden):
		err = awsRefused("AccessDeniedException", "User: arn:aws:iam::"+awsAccount+":user/latticekeep is not authorized to perform: kms:"+target+
			" on this resource because the resource does not exist in this Region, no resource-based policies allow access, or a resource-based policy explicitly denies access")
	}
	if err == nil {
		err = checkSignature(r, body, secret)
	}
	var data map[string]any
	if err == nil {
		s.mu.Lock()
		data, err = s.trent(target, body)
		s.mu.Unlock()
	}
	answerAWS(w, data, err)
}

type awsRequest struct {
	KeyID               string            `json:"KeyId"`
	Plaintext           []byte            `json:"Plaintext"`
	CiphertextBlob      []byte            `json:"CiphertextBlob"`
	EncryptionContext   map[string]string `json:"EncryptionContext"`
	PendingWindowInDays *int              `json:"PendingWindowInDays"`
}

// trent handles one call. The caller holds mu.
func (s *Server) trent(target string, body []byte) (map[string]any, error) {
	var in awsRequest
	if err := json.Unmarshal(body, &in); err != nil {
		return nil, awsRefused("SerializationException", "")
	}
	var k *key
	if in.KeyID != "" || target != "Decrypt" {
		var err error
		if k, err = s.findAWS(in.KeyID, target != "ScheduleKeyDeletion"); err != nil {
			return nil, err
		}
	}
	switch target {
	case "DescribeKey":
		return map[string]any{"KeyMetadata": k.metadata()}, nil
	case "Encrypt":
		if err := k.usable(); err != nil {
			return nil, err
		}
		if len(in.Plaintext) < 1 || len(in.Plaintext) > 4096 {
			return nil, awsRefused("ValidationException", "1 validation error detected: Value at 'plaintext' failed to satisfy constraint: Member must have length less than or equal to 4096")
		}
		sealed := newAEAD(k.versions[k.latest]).Seal(append([]byte(k.uuid()), byte(k.latest)), nil, in.Plaintext, contextAD(in.EncryptionContext))
		return map[string]any{"CiphertextBlob": sealed, "EncryptionAlgorithm": "SYMMETRIC_DEFAULT", "KeyId": k.arn()}, nil
	case "Decrypt":
		return s.decryptAWS(k, in)
	case "ScheduleKeyDeletion":
		days := 30
		if in.PendingWindowInDays != nil {
			days = *in.PendingWindowInDays
		}
		if days < 7 || days > 30 {
			return nil, awsRefused("ValidationException", "PendingWindowInDays must be between 7 and 30")
		}
		if !k.gone.IsZero() {
			return nil, awsRefused("KMSInvalidStateException", k.arn()+" is pending deletion.")
		}
		k.gone = time.Now().AddDate(0, 0, days).Truncate(time.Second)
		return map[string]any{"KeyId": k.arn(), "DeletionDate": k.gone.Unix(), "KeyState": "PendingDeletion", "PendingWindowInDays": days}, nil
	}
	return nil, awsRefused("UnknownOperationException", "")
}

func (s *Server) decryptAWS(named *key, in awsRequest) (map[string]any, error) {
	const idLength = 36
	if len(in.CiphertextBlob) < 1 || len(in.CiphertextBlob) > 6144 {
		return nil, awsRefused("ValidationException", "1 validation error detected: Value at 'ciphertextBlob' failed to satisfy constraint")
	}
	var k *key
	if len(in.CiphertextBlob) > idLength+1 {
		for _, other := range s.keys {
			if other.uuid() == string(in.CiphertextBlob[:idLength]) {
				k = other
			}
		}
	}
	if k == nil {
		return nil, awsRefused("InvalidCiphertextException", "")
	}
	if named != nil && named != k {
		return nil, awsRefused("IncorrectKeyException", "The key ID in the request does not identify a CMK that can perform this operation.")
	}
	if err := k.usable(); err != nil {
		return nil, err
	}
	material, ok := k.versions[int(in.CiphertextBlob[idLength])]
	if !ok {
		return nil, awsRefused("InvalidCiphertextException", "")
	}
	plaintext, err := newAEAD(material).Open(nil, nil, in.CiphertextBlob[idLength+1:], contextAD(in.EncryptionContext))
	if err != nil {
		return nil, awsRefused("InvalidCiphertextException", "")
	}
	return map[string]any{"Plaintext": plaintext, "EncryptionAlgorithm": "SYMMETRIC_DEFAULT", "KeyId": k.arn()}, nil
}

// findAWS finds a key by id, by ARN and, where AWS allows it, by alias.
func (s *Server) findAWS(id string, byAlias bool) (*key, error) {
	alias := strings.TrimPrefix(id, "arn:aws:kms:"+awsRegion+":"+awsAccount+":")
	for name, k := range s.keys {
		if id == k.id() || id == k.arn() || byAlias && alias == "alias/"+name {
			return k, nil
		}
	}
	if strings.HasPrefix(alias, "alias/") {
		return nil, awsRefused("NotFoundException", "Alias arn:aws:kms:"+awsRegion+":"+awsAccount+":"+alias+" is not found.")
	}
	return nil, awsRefused("NotFoundException", "Invalid keyId '"+id+"'")
}

func (k *key) usable() error {
	switch {
	case !k.gone.IsZero():
		return awsRefused("KMSInvalidStateException", k.arn()+" is pending deletion.")
	case k.disabled:
		return awsRefused("DisabledException", k.arn()+" is disabled.")
	case k.kind != "":
		return awsRefused("InvalidKeyUsageException", k.arn()+" key usage or algorithm is not valid for this operation.")
	}
	return nil
}

func (k *key) metadata() map[string]any {
	state, spec, usage, algorithms := "Enabled", "SYMMETRIC_DEFAULT", "ENCRYPT_DECRYPT", []string{"SYMMETRIC_DEFAULT"}
	if k.kind != "" {
		spec, algorithms = k.kind, []string{"RSAES_OAEP_SHA_1", "RSAES_OAEP_SHA_256"}
	}
	if strings.HasPrefix(k.kind, "HMAC") {
		usage, algorithms = "GENERATE_VERIFY_MAC", nil
	}
	m := map[string]any{}
	switch {
	case !k.gone.IsZero():
		state, m["DeletionDate"] = "PendingDeletion", k.gone.Unix()
	case k.disabled:
		state = "Disabled"
	}
	for name, value := range map[string]any{
		"AWSAccountId": awsAccount, "Arn": k.arn(), "KeyId": k.id(), "CreationDate": k.created.Unix(), "Description": "", "Enabled": state == "Enabled",
		"KeyState": state, "KeySpec": spec, "CustomerMasterKeySpec": spec, "KeyUsage": usage, "EncryptionAlgorithms": algorithms,
		"KeyManager": "CUSTOMER", "Origin": "AWS_KMS", "MultiRegion": k.multiRegion,
	} {
		m[name] = value
	}
	return m
}

// contextAD returns the encryption context as associated data.
func contextAD(context map[string]string) []byte {
	b, _ := json.Marshal(context) // keys are sorted
	return b
}

// checkSignature verifies Signature Version 4:
// https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html
func checkSignature(r *http.Request, body []byte, secret string) error {
	denied := &awsError{http.StatusForbidden, "InvalidSignatureException", "The request signature we calculated does not match the signature you provided."}
	fields := make(map[string]string)
	authorization, ok := strings.CutPrefix(r.Header.Get("Authorization"), "AWS4-HMAC-SHA256 ")
	for field := range strings.SplitSeq(authorization, ", ") {
		name, value, _ := strings.Cut(field, "=")
		fields[name] = value
	}
	date := r.Header.Get("X-Amz-Date")
	at, err := time.Parse("20060102T150405Z", date)
	scope, mine := strings.CutPrefix(fields["Credential"], awsKeyID+"/")
	signed := strings.Split(fields["SignedHeaders"], ";")
	switch {
	case !ok:
		return &awsError{http.StatusForbidden, "MissingAuthenticationTokenException", "Missing Authentication Token"}
	case !mine:
		return &awsError{http.StatusForbidden, "UnrecognizedClientException", "The security token included in the request is invalid."}
	case err != nil || time.Since(at).Abs() > 5*time.Minute, scope != date[:8]+"/"+awsRegion+"/kms/aws4_request",
		!slices.Contains(signed, "host"), !slices.Contains(signed, "x-amz-target"):
		return denied
	}
	var canonical strings.Builder
	canonical.WriteString("POST\n/\n\n")
	for _, name := range signed {
		value := r.Header.Get(name)
		switch name {
		case "host":
			value = r.Host
		case "content-length":
			value = fmt.Sprint(len(body))
		}
		canonical.WriteString(name + ":" + strings.TrimSpace(value) + "\n")
	}
	fmt.Fprintf(&canonical, "\n%s\n%x", fields["SignedHeaders"], sha256.Sum256(body))
	text := fmt.Sprintf("AWS4-HMAC-SHA256\n%s\n%s\n%x", date, scope, sha256.Sum256([]byte(canonical.String())))
	key := []byte("AWS4" + secret)
	for _, part := range append(strings.Split(scope, "/"), text) {
		mac := hmac.New(sha256.New, key)
		mac.Write([]byte(part))
		key = mac.Sum(nil)
	}
	if !hmac.Equal([]byte(hex.EncodeToString(key)), []byte(fields["Signature"])) {
		return denied
	}
	return nil
}

func answerAWS(w http.ResponseWriter, data map[string]any, err error) {
	w.Header().Set("Content-Type", "application/x-amz-json-1.1")
	w.Header().Set("X-Amzn-Requestid", rand.Text())
	status := http.StatusOK
	if e := new(awsError); errors.As(err, &e) {
		status, data = e.status, map[string]any{"__type": e.kind}
		if e.text != "" {
			data["message"] = e.text
		}
	}
	var out bytes.Buffer
	_ = json.NewEncoder(&out).Encode(data) // contains only strings, numbers and maps
	w.WriteHeader(status)
	_, _ = w.Write(out.Bytes())
}
