package kms

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	awsconfig "github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/credentials/stscreds"
	awskms "github.com/aws/aws-sdk-go-v2/service/kms"
	"github.com/aws/aws-sdk-go-v2/service/kms/types"
	"github.com/aws/aws-sdk-go-v2/service/sts"
	"github.com/aws/smithy-go"
	"github.com/aws/smithy-go/logging"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// amazon is a key of AWS KMS.
type amazon struct {
	client    *awskms.Client
	arn       string
	transport transport
}

// deletionDays is the shortest waiting period that AWS allows before it destroys a key.
const deletionDays = 7

// openAWS opens awskms:///KEY with the parameters that awsConfig takes. KEY is an id, an ARN,
// alias/NAME or the ARN of an alias. An alias is resolved once: if it later points to another key,
// that counts as another key.
func openAWS(ctx context.Context, u *url.URL, o Options) (*Key, error) {
	name := strings.TrimPrefix(path.Join(u.Host, u.Path), "/")
	values, err := parameters(u, "region", "profile", "role", "endpoint", "dualstack", "fips")
	if err != nil {
		return nil, err
	}
	if name == "" {
		return nil, unfit("name the key of AWS KMS as awskms:///ARN, or awskms:///alias/NAME?region=REGION")
	}
	if values["endpoint"] != "" {
		endpoint, err := url.Parse(values["endpoint"])
		if err != nil {
			return nil, unfit("the parameter endpoint of awskms is no URL: give https://host")
		}
		if err := checkAddress(endpoint); err != nil {
			return nil, err
		}
	}
	if arn := strings.Split(name, ":"); values["region"] == "" && len(arn) == 6 {
		values["region"] = arn[3]
	}
	config, err := awsConfig(ctx, values, o.Logger)
	if err != nil {
		return nil, fault.Wrap(fault.Invalid, "the configuration for AWS cannot be used: check the parameters of the URL, and the AWS environment variables and files", err)
	}
	if config.Region == "" {
		return nil, unfit("the region of the KMS key is not known: name the key by its ARN, or add ?region=REGION")
	}
	// Credentials are fetched with the SDK's own client. They are short-lived, so a recording of
	// the exchange is worthless later.
	base := awshttp.NewBuildableClient()
	if own, ok := config.HTTPClient.(*awshttp.BuildableClient); ok {
		base = own // has AWS_CA_BUNDLE
	}
	a := &amazon{transport: newTransport(base.GetTransport(), o)}
	a.client = awskms.NewFromConfig(config, func(c *awskms.Options) {
		c.HTTPClient = &http.Client{Transport: a.transport}
		c.Retryer = aws.NopRetryer{} // see try
		if endpoint := values["endpoint"]; endpoint != "" {
			c.BaseEndpoint = &endpoint
		}
	})
	err = try(ctx, o.Logger, "reading the key's specification", func(ctx context.Context) error { return a.check(ctx, name) })
	if err != nil {
		_ = a.close()
		return nil, needs("kms:DescribeKey", err)
	}
	return &Key{id: "awskms:" + a.arn, service: a}, nil
}

// awsConfig returns the SDK's configuration from the environment, changed by parameters of the URL.
// It redirects the SDK's log from stderr to logger.
func awsConfig(ctx context.Context, values map[string]string, logger *slog.Logger) (aws.Config, error) {
	options := []func(*awsconfig.LoadOptions) error{
		awsconfig.WithLogger(logging.LoggerFunc(func(_ logging.Classification, format string, v ...any) {
			logger.Debug("the AWS SDK has something to say", "text", fmt.Sprintf(format, v...))
		})),
		awsconfig.WithRegion(values["region"]), awsconfig.WithSharedConfigProfile(values["profile"]),
	}
	for name, option := range map[string]func(*awsconfig.LoadOptions) error{
		"dualstack": awsconfig.WithUseDualStackEndpoint(aws.DualStackEndpointStateEnabled), "fips": awsconfig.WithUseFIPSEndpoint(aws.FIPSEndpointStateEnabled),
	} {
		on, err := strconv.ParseBool(cmp.Or(values[name], "false"))
		if err != nil {
			return aws.Config{}, fmt.Errorf("the parameter %s: %w", name, err)
		}
		if on {
			options = append(options, option)
		}
	}
	config, err := awsconfig.LoadDefaultConfig(ctx, options...)
	if role := values["role"]; err == nil && role != "" {
		if !strings.HasPrefix(role, "arn:") {
			return aws.Config{}, errors.New("the parameter role is no ARN")
		}
		config.Credentials = aws.NewCredentialsCache(stscreds.NewAssumeRoleProvider(sts.NewFromConfig(config), role))
	}
	return config, err
}

// check verifies that the key exists, is symmetric and usable, and stores its ARN.
func (a *amazon) check(ctx context.Context, name string) error {
	out, err := a.client.DescribeKey(ctx, &awskms.DescribeKeyInput{KeyId: &name})
	if err != nil {
		return awsFailed(err)
	}
	m := out.KeyMetadata
	switch {
	case m == nil || m.Arn == nil:
		return unfit("what answers at the address of AWS KMS is not it")
	case m.KeySpec != types.KeySpecSymmetricDefault:
		return unfit("the KMS key is of the specification %s: RSA and EC wrapping is opened by a quantum computer; make a key of SYMMETRIC_DEFAULT", m.KeySpec)
	case m.KeyUsage != types.KeyUsageTypeEncryptDecrypt:
		return unfit("the KMS key is for %s: make one for ENCRYPT_DECRYPT", m.KeyUsage)
	case m.KeyState == types.KeyStatePendingDeletion:
		return unfit("the KMS key is about to be deleted: cancel that with aws kms cancel-key-deletion, and enable it")
	case !m.Enabled:
		return unfit("the KMS key is in the state %s: enable it", m.KeyState)
	}
	a.arn = *m.Arn
	return nil
}

func (a *amazon) encrypt(ctx context.Context, plaintext []byte) ([]byte, error) {
	out, err := a.client.Encrypt(ctx, &awskms.EncryptInput{KeyId: &a.arn, Plaintext: plaintext})
	if err != nil {
		return nil, awsFailed(err)
	}
	return out.CiphertextBlob, nil
}

func (a *amazon) decrypt(ctx context.Context, ciphertext []byte) ([]byte, error) {
	// Without a key id AWS would decrypt with any key that the credentials may use.
	out, err := a.client.Decrypt(ctx, &awskms.DecryptInput{KeyId: &a.arn, CiphertextBlob: ciphertext})
	var e smithy.APIError
	switch {
	case err == nil:
		return out.Plaintext, nil
	case errors.As(err, &e) && slices.Contains([]string{"InvalidCiphertextException", "IncorrectKeyException"}, e.ErrorCode()):
		return nil, ErrForeign
	}
	return nil, awsFailed(err)
}

// passing lists the errors of AWS KMS that call for a retry and that the HTTP status does not
// reveal.
var passing = []string{"ThrottlingException", "LimitExceededException", "KMSInternalException", "DependencyTimeoutException", "KeyUnavailableException", "RequestExpired"}

// refusing lists the errors of AWS KMS that are about the caller's credentials.
var refusing = []string{"AccessDeniedException", "ExpiredTokenException", "IncompleteSignature", "InvalidClientTokenId", "InvalidSignatureException",
	"MissingAuthenticationToken", "NotAuthorized", "UnrecognizedClientException"}

func awsFailed(err error) error {
	var e smithy.APIError
	var response *awshttp.ResponseError
	switch {
	case strings.Contains(err.Error(), "get credentials"):
		return credentials(fault.Outage(fault.ReasonKMS, "there are no credentials for AWS now: give the pod a role, or set the AWS environment variables", err))
	case !errors.As(err, &e):
		return failed(err, true)
	case slices.Contains(passing, e.ErrorCode()):
		return failed(err, true)
	case slices.Contains(refusing, e.ErrorCode()):
		return forbidden(err)
	}
	return failed(err, errors.As(err, &response) && (response.HTTPStatusCode() >= 500 || response.HTTPStatusCode() == http.StatusTooManyRequests))
}

func (a *amazon) destroy(ctx context.Context) (Destruction, error) {
	out, err := a.client.ScheduleKeyDeletion(ctx, &awskms.ScheduleKeyDeletionInput{KeyId: &a.arn, PendingWindowInDays: aws.Int32(deletionDays)})
	var e smithy.APIError
	if errors.As(err, &e) && e.ErrorCode() == "KMSInvalidStateException" {
		return a.destroyed(ctx, err)
	}
	if err != nil {
		return Destruction{}, awsFailed(err)
	}
	return a.destruction(out.DeletionDate), nil
}

// destroyed returns the Destruction if the key's deletion was requested earlier, and otherwise
// refusal.
func (a *amazon) destroyed(ctx context.Context, refusal error) (Destruction, error) {
	out, err := a.client.DescribeKey(ctx, &awskms.DescribeKeyInput{KeyId: &a.arn})
	if err != nil {
		return Destruction{}, fault.Wrap(fault.Unavailable, "it cannot be read whether AWS is to delete the key: retry", err)
	}
	if m := out.KeyMetadata; m != nil && (m.KeyState == types.KeyStatePendingDeletion || m.KeyState == types.KeyStatePendingReplicaDeletion) {
		return a.destruction(m.DeletionDate), nil
	}
	return Destruction{}, awsFailed(refusal)
}

func (a *amazon) destruction(at *time.Time) Destruction {
	d := Destruction{Undo: "aws kms cancel-key-deletion --key-id " + a.arn + ", then aws kms enable-key"}
	if at != nil {
		d.When = at.UTC()
	}
	if strings.Contains(a.arn, ":key/mrk-") {
		d.Left = "its replicas in other regions still open what it wrapped: have AWS delete those, too"
		if at == nil {
			d.Left += "; it deletes this one seven days after the last of them"
		}
	}
	return d
}

func (a *amazon) close() error {
	a.transport.CloseIdleConnections()
	return nil
}
