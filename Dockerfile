# One static program and the certificates of public authorities. Built from a clean checkout it is the same to the byte wherever it is built:
# the version comes from the commit, and no path, time or host is in it.
FROM --platform=$BUILDPLATFORM golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG TARGETOS TARGETARCH
RUN CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH go build -tags=nomsgpack -trimpath -buildvcs=true -ldflags="-s -w -buildid=" -o /latticekeep .

FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /latticekeep /latticekeep
USER 65532:65532
EXPOSE 8200 8201 8443 8444
ENTRYPOINT ["/latticekeep"]
