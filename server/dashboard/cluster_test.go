package dashboard_test

import (
	"encoding/json"
	"time"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// cluster is what the interface answers of the objects of a cluster, which no test of this package has.
func (e *estate) cluster() string {
	now := time.Now().UTC().Truncate(time.Second)
	at := func(days int) *time.Time { t := now.Add(time.Duration(days) * day); return &t }
	strict, former := v2.SealedCredentialScopeStrict, "c41d"+e.sealing[4:]
	ready := func(ok v2.ObjectConditionStatus, reason, message string) v2.ObjectCondition {
		return v2.ObjectCondition{Type: "Ready", Status: ok, Reason: reason, Message: message, LastTransitionTime: *at(-3)}
	}
	synced := v2.ObjectCondition{Type: "TargetSynced", Status: "True", Reason: "Synced", Message: "The Secret holds the values of version 3.", LastTransitionTime: *at(-3)}
	return encoded(v2.SealedCredentialList{
		Success: true, Operator: true,
		SealedCredentials: []v2.SealedCredential{
			{Namespace: "billing", Name: "stripe", CredentialType: "api_key", Source: "sealed", KeyId: &e.sealing, Scope: &strict, CreatedAt: *at(-40), Generation: 3, ObservedGeneration: 3,
				CredentialId: &e.credential, Version: 3, TargetSecret: new("stripe"), NextRotationAt: at(27), ExpiresAt: at(57),
				Conditions: []v2.ObjectCondition{ready("True", "Sealed", "The vault entry holds what the spec says."), synced}},
			{Namespace: "billing", Name: "timescale", CredentialType: "database", Source: "generate", CreatedAt: *at(-12), Generation: 1, ObservedGeneration: 1,
				CredentialId: &e.credential, Version: 1, TargetSecret: new("timescale"), NextRotationAt: at(18), ExpiresAt: at(48),
				Conditions: []v2.ObjectCondition{ready("True", "Sealed", "The vault entry holds what the spec says."), synced}},
			{Namespace: "portal", Name: "session-key", CredentialType: "webhook_secret", Source: "sealed", KeyId: &former, Scope: &strict, CreatedAt: *at(-90), Generation: 2, ObservedGeneration: 1,
				Conditions: []v2.ObjectCondition{ready("False", "CannotOpen", "A value does not open with any key of this deployment. Seal it again.")}},
		},
		SealingKeys: []v2.SealingKeyUse{{KeyId: e.sealing, State: "current", Objects: 1}, {KeyId: former, State: "former", Objects: 1}},
	})
}

// encoded is a value as JSON.
func encoded(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // an answer of the interface can be written
	}
	return string(text)
}
