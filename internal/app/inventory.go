package app

import (
	"context"
	"strconv"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/compliance/report"
	"github.com/latticekeep/latticekeep/internal/keyring"
)

// inventory lists the algorithms in use and the live keys that protect what a
// tenant has here: its own, and the deployment's.
func (p *proving) inventory(ctx context.Context, s *service, who authz.Principal) ([]byte, error) {
	in := report.Inventory{
		Tenant: who.Tenant, Program: "latticekeep", Version: version(), At: s.now(),
		Algorithms: []report.Algorithm{
			report.MLKEM768, report.MLDSA65, report.AES256GCM, report.HKDFSHA512, report.HMACSHA512, report.SHA3256, report.SHA256, report.Argon2id, report.X25519,
			report.HPKEHybrid, report.HPKEPure,
		},
	}
	switch p.transport {
	case compliance.TransportTLS13Quantum:
		in.Algorithms = append(in.Algorithms, report.GroupHybrid)
	case compliance.TransportTLS13:
		in.Algorithms = append(in.Algorithms, report.GroupHybrid, report.GroupX25519, report.GroupSecp256r1, report.GroupSecp384r1)
	}
	custody := "the key-management service"
	if p.custody != compliance.CustodyKMS {
		custody = "a local key file"
	}
	add := func(k report.Key) {
		k.SecuredBy, k.WrappedBy = custody, report.AES256GCM
		in.Keys = append(in.Keys, k)
	}
	add(report.Key{ID: "audit/" + s.keys.Audit().Public().ID(), Name: "audit log", Type: report.PrivateKey, Algorithm: report.MLDSA65, State: report.Active})
	add(report.Key{ID: "identity/" + s.keys.Identity().ID(), Name: "deployment identity", Type: report.PrivateKey, Algorithm: report.MLDSA65, State: report.Active})
	signing, err := s.keys.PublicKeys(ctx, who.Tenant)
	if err != nil {
		return nil, err
	}
	for i, k := range signing { // the newest first
		state := report.Active
		if i > 0 {
			state = report.Deactivated
		}
		version := strconv.FormatUint(uint64(k.Version), 10)
		add(report.Key{ID: "signing/" + version, Name: "signatures of the tenant", Type: report.PrivateKey, Algorithm: report.MLDSA65, State: state})
		add(report.Key{ID: "mac/" + version, Name: "signatures of the tenant", Type: report.SecretKey, Algorithm: report.HMACSHA512, State: state})
		add(report.Key{ID: "wrapping/" + version, Name: "wrapping key of the tenant", Type: report.SecretKey, Algorithm: report.AES256GCM, State: state})
	}
	named, err := s.transit.Survey(ctx, who.Tenant)
	if err != nil {
		return nil, err
	}
	for _, k := range named {
		add(report.Key{
			ID: k.ID + "/" + strconv.FormatUint(uint64(k.Version), 10), Name: "named key", Type: report.PrivateKey, Algorithm: report.MLKEM768, State: report.Active,
			CreatedAt: k.RotatedAt, ExpiresAt: k.NextRotation,
		})
	}
	sealing, err := s.keys.SealingKeys(ctx)
	if err != nil {
		return nil, err
	}
	for _, k := range sealing {
		state := report.Deactivated
		switch k.State {
		case keyring.SealingKeyCurrent:
			state = report.Active
		case keyring.SealingKeyRetired:
			state = report.Suspended
		}
		add(report.Key{ID: "sealing/" + k.ID, Name: "sealed values", Type: report.PrivateKey, Algorithm: report.Algorithm(k.Suite), State: state, CreatedAt: k.CreatedAt})
	}
	return report.CBOM(in)
}
