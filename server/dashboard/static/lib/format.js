// How things are written.

const instant = new Intl.DateTimeFormat(undefined, {dateStyle: 'medium', timeStyle: 'medium'});
const day = new Intl.DateTimeFormat(undefined, {dateStyle: 'medium'});
const relative = new Intl.RelativeTimeFormat('en', {numeric: 'auto'});
const grouped = new Intl.NumberFormat('en');

// localTime is in the viewer's zone; utc, for hovering, names the zone.
export const localTime = text => instant.format(new Date(text));
export const localDay = text => day.format(new Date(text));
export const utc = text => new Date(text).toISOString().replace('T', ' ').replace(/(\.000)?Z$/, '') + ' UTC';

const steps = [['year', 31557600], ['month', 2629800], ['day', 86400], ['hour', 3600], ['minute', 60], ['second', 1]];

// ago is "in 3 days" or "2 hours ago".
export function ago(text, now = Date.now()) {
  const seconds = (new Date(text).getTime() - now) / 1000;
  const [unit, length] = steps.find(([, n]) => Math.abs(seconds) >= n) ?? steps.at(-1);
  return relative.format(Math.round(seconds / length), unit);
}

export const number = n => grouped.format(n);

// count is a number with its unit: count(1, 'entry', 'entries') is "1 entry".
export const count = (n, one, many = one + 's') => `${grouped.format(n)} ${n === 1 ? one : many}`;

// visible shows control and direction characters as what they are, so that a name
// cannot pretend to be another one or turn the line around. The joiners that Persian and
// some pictures are written with stay.
export const visible = text => String(text).replace(/[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g,
  c => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, '0')}⟩`);

// short is the beginning and the end of a hash or an id.
export const short = text => text.length <= 16 ? text : text.slice(0, 8) + '…' + text.slice(-6);

// words turns CREDENTIAL_UNSEALED and no_data into text.
export const words = code => {
  const text = String(code).toLowerCase().replaceAll('_', ' ').replace(/\b(api|kms)\b/g, w => w.toUpperCase());
  return text.charAt(0).toUpperCase() + text.slice(1);
};

// The verbs that event types end with, and their infinitives.
const verbs = {
  accepted: 'accept', acknowledged: 'acknowledge', activated: 'activate', adopted: 'adopt', approved: 'approve', archived: 'archive', assessed: 'assess', changed: 'change',
  checked: 'check', committed: 'commit', created: 'create', decrypted: 'decrypt', deleted: 'delete', destroyed: 'destroy', described: 'describe',
  encrypted: 'encrypt', ended: 'end', erased: 'erase', exported: 'export', invited: 'invite', joined: 'join', limited: 'limit', listed: 'list', mapped: 'map',
  read: 'read', reencrypted: 're-encrypt', refreshed: 'refresh', registered: 'register', released: 'release', removed: 'remove', reported: 'report',
  requested: 'request', resealed: 'reseal', reset: 'reset', restored: 'restore', retired: 'retire', reviewed: 'review', revoked: 'revoke',
  rewrapped: 'rewrap', rotated: 'rotate', scored: 'score', sealed: 'seal', sent: 'send', signed: 'sign', suspended: 'suspend', started: 'start', taken: 'take', unsealed: 'unseal', bound: 'bind', unbound: 'unbind',
  verified: 'verify',
};
const attempts = {
  USER_REGISTERED: 'Register', USER_SIGNED_IN: 'Sign in', USER_SIGNED_OUT: 'Sign out', MEMBER_JOINED: 'Join', AUDIT_READ: 'Read audit log',
  AUDIT_EXPORTED: 'Export audit log', COMPLIANCE_REPORTED: 'Report on compliance', KMS_REWRAPPED: 'Rewrap keys', KMS_KEY_DESTROYED: 'Destroy KMS key',
};

// attempt turns CREDENTIAL_UNSEALED into "Unseal credential".
export function attempt(type) {
  const parts = type.split('_'), verb = verbs[parts.at(-1).toLowerCase()];
  if (attempts[type]) return attempts[type];
  if (!verb || parts.length === 1 || type === 'RATE_LIMITED') return words(type);
  const what = words(parts.slice(0, -1).join('_')).replace(/^[A-Z](?![A-Z])/, c => c.toLowerCase());
  return words(verb) + ' ' + what + (verb === 'list' ? 's' : '');
}

// deed says what an audit entry is about: what was done, or what was attempted and was
// denied or failed.
export const deed = entry => entry.outcome === 'success' ? words(entry.event_type) : attempt(entry.event_type);

// overTLS is for sentences on how something goes to the server, which may be reached in
// the clear.
export const overTLS = location.protocol === 'https:' ? ' over TLS' : '';

export const frameworks = {
  soc2: 'SOC 2', iso27001: 'ISO 27001', pci_dss: 'PCI DSS', hipaa: 'HIPAA', gdpr: 'GDPR', nist_csf: 'NIST CSF',
  fedramp: 'FedRAMP', apra: 'APRA CPS 234', nist_800_53: 'NIST SP 800-53',
};
