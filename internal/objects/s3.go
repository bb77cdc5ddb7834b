package objects

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/ratelimit"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/credentials/stscreds"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"github.com/aws/aws-sdk-go-v2/service/sts"
	"github.com/aws/smithy-go"
	"github.com/aws/smithy-go/logging"
)

// s3Bucket is a bucket of S3 or of a service with the same protocol.
type s3Bucket struct {
	client     *s3.Client
	bucket     *string
	encryption types.ServerSideEncryption
	kmsKey     *string
}

// s3Parameters are the query parameters of an S3 URL. Their names and meanings are those of
// gocloud.dev/blob/s3blob.
type s3Parameters struct {
	values url.Values
	err    error // error for the first unreadable parameter
}

func (p *s3Parameters) text(name string) string {
	v := p.values.Get(name)
	p.values.Del(name)
	return v
}

func (p *s3Parameters) boolean(name string) bool {
	text := p.text(name)
	if text == "" {
		return false
	}
	v, err := strconv.ParseBool(text)
	if err != nil && p.err == nil {
		p.err = fmt.Errorf("the parameter %s is %q: give true or false", name, text)
	}
	return v
}

// required reports whether the parameter is when_required rather than when_supported.
func (p *s3Parameters) required(name, without string) bool {
	text := cmp.Or(p.text(name), without)
	switch strings.ToLower(text) {
	case "when_supported":
		return false
	case "when_required":
		return true
	}
	if p.err == nil {
		p.err = fmt.Errorf("the parameter %s is %q: give when_supported or when_required", name, text)
	}
	return false
}

func openS3(ctx context.Context, u *url.URL) (cloud, error) {
	p := &s3Parameters{values: u.Query()}
	load := []func(*config.LoadOptions) error{
		config.WithLogger(logging.Nop{}), // otherwise the SDK writes to standard error
		config.WithRegion(p.text("region")), config.WithSharedConfigProfile(p.text("profile")),
	}
	if p.boolean("dualstack") {
		load = append(load, config.WithUseDualStackEndpoint(aws.DualStackEndpointStateEnabled))
	}
	if p.boolean("fips") {
		load = append(load, config.WithUseFIPSEndpoint(aws.FIPSEndpointStateEnabled))
	}
	if p.boolean("anonymous") {
		load = append(load, config.WithCredentialsProvider(aws.AnonymousCredentials{}))
	}
	if p.values.Has("request_checksum_calculation") {
		calculation := aws.RequestChecksumCalculationWhenSupported
		if p.required("request_checksum_calculation", "") {
			calculation = aws.RequestChecksumCalculationWhenRequired
		}
		load = append(load, config.WithRequestChecksumCalculation(calculation))
	}
	// All data read here carries a hash or a signature of its own.
	validation := aws.ResponseChecksumValidationWhenSupported
	if p.required("response_checksum_validation", "when_required") {
		validation = aws.ResponseChecksumValidationWhenRequired
	}
	load = append(load, config.WithResponseChecksumValidation(validation))
	limiter := retry.RateLimiter(ratelimit.None)
	if text := p.text("rate_limiter_capacity"); text != "" {
		capacity, err := strconv.ParseUint(text, 10, 31)
		if err != nil {
			return nil, fmt.Errorf("the parameter rate_limiter_capacity is %q: give a number", text)
		}
		if capacity > 0 {
			limiter = ratelimit.NewTokenRateLimit(uint(capacity))
		}
	}
	load = append(load, config.WithRetryer(func() aws.Retryer {
		return retry.NewStandard(func(o *retry.StandardOptions) { o.RateLimiter = limiter })
	}))
	role := p.text("role")
	endpoint, accelerate, plain := p.text("endpoint"), p.boolean("accelerate"), p.boolean("disable_https")
	pathStyle := slices.Contains([]bool{p.boolean("use_path_style"), p.boolean("s3ForcePathStyle"), p.boolean("hostname_immutable")}, true)
	b := &s3Bucket{bucket: aws.String(u.Host)}
	if text := p.text("ssetype"); text != "" {
		all := b.encryption.Values()
		i := slices.IndexFunc(all, func(e types.ServerSideEncryption) bool { return strings.EqualFold(string(e), text) })
		if i < 0 {
			return nil, fmt.Errorf("the parameter ssetype is %q: give one of %v", text, all)
		}
		b.encryption = all[i]
	}
	if text := p.text("kmskeyid"); text != "" {
		b.kmsKey = &text
	}
	p.values.Del("awssdk") // once selected a version of the SDK
	for name := range p.values {
		return nil, fmt.Errorf("the parameter %s is unknown", name)
	}
	if p.err != nil {
		return nil, p.err
	}
	cfg, err := config.LoadDefaultConfig(ctx, load...)
	if err != nil {
		return nil, err
	}
	if role != "" {
		if !strings.HasPrefix(role, "arn:") {
			return nil, errors.New("the parameter role is no ARN")
		}
		cfg.Credentials = aws.NewCredentialsCache(stscreds.NewAssumeRoleProvider(sts.NewFromConfig(cfg), role))
	}
	b.client = s3.NewFromConfig(cfg, func(o *s3.Options) {
		o.UseAccelerate, o.UsePathStyle, o.EndpointOptions.DisableHTTPS = accelerate, pathStyle, plain
		if endpoint != "" {
			o.BaseEndpoint = &endpoint
		}
	})
	return b, nil
}

// s3Failed turns the errors for a missing object into fs.ErrNotExist.
func s3Failed(err error) error {
	var named smithy.APIError
	var response *awshttp.ResponseError
	switch {
	case errors.As(err, &named) && slices.Contains([]string{"NoSuchBucket", "NoSuchKey", "NotFound", "ObjectNotInActiveTierError"}, named.ErrorCode()),
		named == nil && errors.As(err, &response) && (response.HTTPStatusCode() == http.StatusNotFound || response.HTTPStatusCode() == http.StatusMovedPermanently):
		return fmt.Errorf("%w: %w", fs.ErrNotExist, err)
	}
	return err
}

// markName names the metadata by which a write knows its own object. The client repeats a request whose
// answer was lost, and the service refuses the repetition if the first one went through.
const markName = "latticekeep-write"

func newMark() map[string]string { return map[string]string{markName: rand.Text()} }

// has reports whether an object is the one that was written with a mark.
func (b *s3Bucket) has(ctx context.Context, name string, mark map[string]string) bool {
	out, err := b.client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: b.bucket, Key: &name})
	return err == nil && out.Metadata[markName] == mark[markName]
}

func (b *s3Bucket) put(ctx context.Context, name string, data []byte, k kind, fresh bool) error {
	input := &s3.PutObjectInput{
		Bucket: b.bucket, Key: &name, Body: bytes.NewReader(data), ContentType: &k.contentType, ContentDisposition: &k.contentDisposition,
		ServerSideEncryption: b.encryption, SSEKMSKeyId: b.kmsKey,
	}
	if fresh {
		input.IfNoneMatch, input.Metadata = aws.String("*"), newMark()
	}
	_, err := b.client.PutObject(ctx, input)
	var response *awshttp.ResponseError
	if fresh && errors.As(err, &response) && response.HTTPStatusCode() == http.StatusPreconditionFailed {
		if b.has(ctx, name, input.Metadata) {
			return nil
		}
		return fmt.Errorf("%w: %w", fs.ErrExist, err)
	}
	return err
}

func (b *s3Bucket) read(ctx context.Context, name string) (io.ReadCloser, int64, error) {
	out, err := b.client.GetObject(ctx, &s3.GetObjectInput{Bucket: b.bucket, Key: &name})
	if err != nil {
		return nil, 0, s3Failed(err)
	}
	return out.Body, aws.ToInt64(out.ContentLength), nil
}

func (b *s3Bucket) size(ctx context.Context, name string) (int64, error) {
	out, err := b.client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: b.bucket, Key: &name})
	if err != nil {
		return 0, s3Failed(err)
	}
	return aws.ToInt64(out.ContentLength), nil
}

func (b *s3Bucket) list(ctx context.Context, prefix, after string, most int) (names []string, err error) {
	input := &s3.ListObjectsV2Input{Bucket: b.bucket, Prefix: &prefix, MaxKeys: aws.Int32(int32(min(most, 1000)))}
	if after != "" {
		input.StartAfter = &after
	}
	pages := s3.NewListObjectsV2Paginator(b.client, input)
	for len(names) < most && pages.HasMorePages() {
		page, err := pages.NextPage(ctx)
		if err != nil {
			return nil, err
		}
		for _, o := range page.Contents {
			names = append(names, aws.ToString(o.Key))
		}
	}
	return names[:min(len(names), most)], nil
}

// s3Upload is an upload in parts.
type s3Upload struct {
	*s3Bucket
	key, id *string
	mark    map[string]string
	done    []types.CompletedPart
}

func (b *s3Bucket) upload(ctx context.Context, name string, k kind) (upload, error) {
	algorithm := types.ChecksumAlgorithmCrc32 // what the SDK sends with each part
	if b.client.Options().RequestChecksumCalculation == aws.RequestChecksumCalculationWhenRequired {
		algorithm = ""
	}
	mark := newMark()
	out, err := b.client.CreateMultipartUpload(ctx, &s3.CreateMultipartUploadInput{
		Bucket: b.bucket, Key: &name, ContentType: &k.contentType, ContentDisposition: &k.contentDisposition,
		ServerSideEncryption: b.encryption, SSEKMSKeyId: b.kmsKey, ChecksumAlgorithm: algorithm, Metadata: mark,
	})
	if err != nil {
		return nil, err
	}
	return &s3Upload{s3Bucket: b, key: &name, id: out.UploadId, mark: mark}, nil
}

func (u *s3Upload) part(ctx context.Context, data []byte, last bool) error {
	number := aws.Int32(int32(len(u.done) + 1))
	out, err := u.client.UploadPart(ctx, &s3.UploadPartInput{Bucket: u.bucket, Key: u.key, UploadId: u.id, PartNumber: number, Body: bytes.NewReader(data)})
	if err != nil {
		return err
	}
	u.done = append(u.done, types.CompletedPart{PartNumber: number, ETag: out.ETag, ChecksumCRC32: out.ChecksumCRC32})
	if last {
		_, err = u.client.CompleteMultipartUpload(ctx, &s3.CompleteMultipartUploadInput{
			Bucket: u.bucket, Key: u.key, UploadId: u.id, MultipartUpload: &types.CompletedMultipartUpload{Parts: u.done},
		})
		if err != nil && u.has(ctx, *u.key, u.mark) {
			err = nil
		}
	}
	return err
}

func (u *s3Upload) abort(ctx context.Context) error {
	_, err := u.client.AbortMultipartUpload(ctx, &s3.AbortMultipartUploadInput{Bucket: u.bucket, Key: u.key, UploadId: u.id})
	return err
}

func (b *s3Bucket) delete(ctx context.Context, name string) error {
	_, err := b.client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: b.bucket, Key: &name})
	if err != nil {
		return s3Failed(err)
	}
	return nil
}

func (b *s3Bucket) sign(ctx context.Context, name string, lifetime time.Duration) (string, error) {
	signed, err := s3.NewPresignClient(b.client, s3.WithPresignExpires(lifetime)).
		PresignGetObject(ctx, &s3.GetObjectInput{Bucket: b.bucket, Key: &name})
	if err != nil {
		return "", err
	}
	return signed.URL, nil
}
