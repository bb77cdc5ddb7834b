// The words that several pages share, one for each thing, as the glossary of docs/contributing/style.md and the
// commands have them. What only one page says stands in it.

// remedies says what went wrong and what to do, by the status of the answer.
export const remedies = {
  0: ['No connection', 'The server could not be reached. Check your connection and try again. What you entered is still here.'],
  400: ['Not understood', 'The server could not use this. Check what you entered and send it again.'],
  401: ['Signed out', 'Your session has ended. Sign in again to continue.'],
  403: ['Not allowed', 'Your role or the plan does not allow this, or it does not exist. Ask an owner of your organisation if you need it.'],
  404: ['Not found', 'It does not exist, or no longer. Go back to the list and look for it there.'],
  409: ['Changed meanwhile', 'This conflicts with what is there now. Load the page again, look at what has changed, and repeat it if you still want it.'],
  413: ['Too large', 'Requests hold at most 1 MiB. Send less at a time.'],
  422: ['Check what you entered', 'Something is missing or not as it must be. Correct it and send it again.'],
  429: ['Too many requests', 'Wait until the countdown has ended, then try again. Nothing was done.'],
  500: ['An error of ours', 'Something went wrong on the server. Try again; if it stays, report the request id.'],
  503: ['Not available just now', 'The service cannot do this at the moment. Wait a little and look whether a change was made before you repeat it.'],
};

// What each scope allows, in the order of the contract.
export const scopes = {
  'vault:read': 'List and read credentials', 'vault:write': 'Create, change and delete credentials',
  'crypto:encrypt': 'Encrypt data', 'crypto:decrypt': 'Decrypt data', 'crypto:sign': 'Sign data', 'crypto:verify': 'Verify signatures',
  'keys:read': 'List named keys', 'keys:write': 'Create and rotate named keys',
  'audit:read': 'Read the audit log', 'audit:names': 'Read what the ids in the audit log are called', 'audit:write': 'Add what the logs of nodes hold', 'compliance:read': 'Read scores and reports', 'account:admin': 'Manage API keys and members',
  'system:admin': 'Administer the deployment', 'metrics:read': 'Read the metrics of the deployment',
};

// Roles of members, the widest first, but for the auditor.
export const roles = [['owner', 'Owner: full access, manages owners'], ['admin', 'Admin: full access, except to owners'], ['member', 'Member: credentials, encryption and signatures'], ['limited', 'Limited: credentials on the paths of their policies'], ['auditor', 'Auditor: reads the audit log, keys and compliance']];

// What made a version of a credential.
export const changes = {sealed: 'created', rotated: 'new values', reencrypted: 're-encrypted'};

export const frameworks = {
  soc2: 'SOC 2', iso27001: 'ISO 27001', pci_dss: 'PCI DSS', hipaa: 'HIPAA', gdpr: 'GDPR', nist_csf: 'NIST CSF',
  fedramp: 'FedRAMP', apra: 'APRA CPS 234', nist_800_53: 'NIST SP 800-53',
};

// ---- events of the audit log

// words turns KEY_ROTATED and no_data into text.
export const words = code => {
  const text = String(code).toLowerCase().replaceAll('_', ' ').replace(/\b(api|kms)\b/g, w => w.toUpperCase());
  return text.charAt(0).toUpperCase() + text.slice(1);
};

// The verbs that event types end with, and their infinitives.
const verbs = {
  accepted: 'accept', acknowledged: 'acknowledge', activated: 'activate', adopted: 'adopt', approved: 'approve', archived: 'archive', assessed: 'assess', changed: 'change',
  checked: 'check', committed: 'commit', created: 'create', decrypted: 'decrypt', deleted: 'delete', destroyed: 'destroy', described: 'describe',
  encrypted: 'encrypt', ended: 'end', erased: 'erase', exported: 'export', invited: 'invite', joined: 'join', limited: 'limit', listed: 'list', mapped: 'map',
  read: 'read', recorded: 'record', reencrypted: 're-encrypt', refreshed: 'refresh', registered: 'register', released: 'release', removed: 'remove', reported: 'report',
  requested: 'request', resealed: 'reseal', reset: 'reset', restored: 'restore', retired: 'retire', reviewed: 'review', revoked: 'revoke',
  rewrapped: 'rewrap', rotated: 'rotate', scored: 'score', sealed: 'seal', sent: 'send', signed: 'sign', suspended: 'suspend', started: 'start', taken: 'take', unsealed: 'unseal', bound: 'bind', unbound: 'unbind',
  verified: 'verify',
};
// What is called otherwise than in the interface, as the buttons have it: what was done, and the attempt.
const titles = {
  CREDENTIAL_SEALED: ['Credential created', 'Create credential'], CREDENTIAL_UNSEALED: ['Credential read', 'Read credential'],
  CREDENTIAL_REENCRYPTED: ['Credential re-encrypted', 'Re-encrypt credential'],
};
const attempts = {
  USER_REGISTERED: 'Register', USER_SIGNED_IN: 'Sign in', USER_SIGNED_OUT: 'Sign out', MEMBER_JOINED: 'Join', AUDIT_READ: 'Read audit log',
  AUDIT_EXPORTED: 'Export audit log', COMPLIANCE_REPORTED: 'Report on compliance', KMS_REWRAPPED: 'Rewrap keys', KMS_KEY_DESTROYED: 'Destroy KMS key',
};

// event turns KEY_ROTATED into "Key rotated".
const event = type => titles[type]?.[0] ?? words(type);

// attempt turns KEY_ROTATED into "Rotate key".
export function attempt(type) {
  const parts = type.split('_'), verb = verbs[parts.at(-1).toLowerCase()];
  if (titles[type] ?? attempts[type]) return titles[type]?.[1] ?? attempts[type];
  if (!verb || parts.length === 1 || type === 'RATE_LIMITED') return words(type);
  const what = words(parts.slice(0, -1).join('_')).replace(/^[A-Z](?![A-Z])/, c => c.toLowerCase());
  return words(verb) + ' ' + what + (verb === 'list' ? 's' : '');
}

// deed says what an audit entry is about: what was done, or what was attempted and was
// denied or failed.
export const deed = entry => entry.outcome === 'success' ? event(entry.event_type) : attempt(entry.event_type);

// All types of events, with what they are called.
export const eventTypes = `CHAIN_STARTED SEALING_KEY_CREATED SEALING_KEY_LISTED SEALING_KEY_RETIRED SEALING_KEY_RESTORED MANIFEST_RESEALED MANIFEST_CHECKED
  BACKUP_TAKEN KMS_KEY_LISTED KMS_REWRAPPED KMS_KEY_DESTROYED TENANT_CREATED TENANT_LISTED TENANT_ACTIVATED TENANT_LIMITED NAMESPACE_MAPPED
  API_KEY_CREATED API_KEY_APPROVED API_KEY_SUSPENDED API_KEY_LISTED API_KEY_REVOKED CREDENTIAL_SEALED CREDENTIAL_LISTED CREDENTIAL_UNSEALED CREDENTIAL_ROTATED CREDENTIAL_REENCRYPTED CREDENTIAL_DESCRIBED
  CREDENTIAL_VERSION_ENDED CREDENTIAL_DELETED CREDENTIAL_RELEASED CREDENTIAL_ADOPTED KEY_CREATED KEY_LISTED KEY_ROTATED DATA_ENCRYPTED DATA_DECRYPTED DATA_REWRAPPED
  DATA_SIGNED DATA_VERIFIED PUBLIC_KEY_READ USER_REGISTERED USER_SIGNED_IN USER_SIGNED_OUT ACCOUNT_READ SESSION_REFRESHED SESSION_LISTED SESSION_ENDED
  EMAIL_VERIFIED VERIFICATION_REQUESTED PASSWORD_CHANGED PASSWORD_RESET_REQUESTED PASSWORD_RESET MEMBER_LISTED MEMBER_INVITED MEMBER_JOINED
  MEMBER_CHANGED MEMBER_REMOVED INVITATION_REVOKED HISTORY_RULE_LISTED HISTORY_RULE_CHANGED GROUP_LISTED GROUP_CREATED GROUP_CHANGED GROUP_DELETED WEBHOOK_LISTED WEBHOOK_CREATED WEBHOOK_DELETED WEBHOOK_SENT WEBHOOK_FAILED
  SETTINGS_READ SETTINGS_CHANGED POLICY_LISTED POLICY_CREATED POLICY_CHANGED POLICY_DELETED POLICY_BOUND POLICY_UNBOUND ACCESS_CHECKED AUDIT_READ PROOF_READ AUDIT_EXPORTED LOG_ARCHIVED ANCHOR_STARTED ANCHOR_REFUSED ROLLBACK_ACCEPTED STATE_COMMITTED STATE_ROWS_ACCEPTED STATE_ROWS_REMOVED
  METRICS_READ COMPLIANCE_ASSESSED COMPLIANCE_SCORED COMPLIANCE_HISTORY_READ COMPLIANCE_REPORTED INVENTORY_READ DENIALS_ACKNOWLEDGED ACCESS_REVIEWED INVENTORY_REVIEWED REVIEW_NOTE_ERASED NAMES_ERASED NODE_LOG_RECORDED RATE_LIMITED ACCESS_REFUSED`.split(/\s+/)
  .map(type => [type, event(type)]).sort(([, a], [, b]) => a.localeCompare(b));

// The types of events that change nothing that is kept. internal/audit/category.go lists the others; a test compares.
const unchanging = new Set(`SEALING_KEY_LISTED MANIFEST_RESEALED MANIFEST_CHECKED BACKUP_TAKEN KMS_KEY_LISTED TENANT_LISTED API_KEY_LISTED CREDENTIAL_LISTED KEY_LISTED
  DATA_ENCRYPTED DATA_REWRAPPED DATA_SIGNED DATA_VERIFIED PUBLIC_KEY_READ USER_SIGNED_IN USER_SIGNED_OUT ACCOUNT_READ SESSION_REFRESHED SESSION_LISTED MEMBER_LISTED
  HISTORY_RULE_LISTED WEBHOOK_LISTED WEBHOOK_SENT WEBHOOK_FAILED SETTINGS_READ POLICY_LISTED GROUP_LISTED ACCESS_CHECKED AUDIT_READ PROOF_READ AUDIT_EXPORTED LOG_ARCHIVED
  ANCHOR_STARTED METRICS_READ COMPLIANCE_ASSESSED COMPLIANCE_SCORED COMPLIANCE_HISTORY_READ COMPLIANCE_REPORTED INVENTORY_READ NODE_LOG_RECORDED RATE_LIMITED ACCESS_REFUSED`.split(/\s+/));
const secrets = new Set(['CREDENTIAL_UNSEALED', 'DATA_DECRYPTED']);

// isOf reports whether a type of events is in a category of the interface.
export const isOf = {changes: type => !unchanging.has(type) && !secrets.has(type), secrets: type => secrets.has(type)};
