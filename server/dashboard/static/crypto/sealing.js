// Seals values in the page: what leaves it is a SealedCredential manifest whose
// values only the vault can open. The formats are those of docs/formats.md, and the
// rules those of "latticekeep seal".
import {ml_dsa65, sha3_256} from '../vendor/noble.js';
import {frame, fromBase64, toBase64, toHex, concat, u64, utf8} from './bytes.js';
import {seal, suites, tagLength} from './hpke.js';

const documentContext = 'latticekeep/sealing-key/v1';
const identityAlgorithm = 'ML-DSA-65';
const maxDocument = 16 << 10;
const identityKeyLength = 1952;
const version = 1; // of a sealed value

// What the resource allows.
const maxTTLDays = 3650, maxTypeLength = 63, maxValues = 64, maxSealedText = 349528, maxKeyLength = 253;
const scopes = ['Strict', 'Namespace', 'Cluster'];

// verified has the keys that came out of readSealingKey: sealManifest takes no others.
const verified = new WeakSet();

/**
 * readSealingKey reads the document of GET /api/v2/sealing-key, as text or parsed, and
 * verifies it: its form is the canonical one, its key_id that of its key, and its
 * signature that of the identity inside it. It resolves to {suite, keyID, createdAt,
 * identity}, identity being the fingerprint of who signed it: whose that is, somebody
 * has to compare with what reached them another way. Error: why it is refused.
 * @param {string | object} document
 * @returns {Promise<SealingKey>}
 */
export async function readSealingKey(document) {
  const text = typeof document === 'string' ? document : JSON.stringify(document);
  if (!text?.isWellFormed() || utf8(text).length > maxDocument) throw new Error('This is not a sealing key document: fetch it again.');
  let d;
  try {
    d = JSON.parse(text);
  } catch {
    throw new Error('The sealing key document is not JSON: fetch it again.');
  }
  if (d === null || typeof d !== 'object') throw new Error('This is not a sealing key document: fetch it again.');
  if (d.version !== 1) throw new Error('The sealing key document is of a version that this page does not know: load the page anew.');

  // Comparing with what would be written refuses further, missing, repeated and
  // reordered fields and other spellings at once.
  const canonical = JSON.stringify({
    version: 1, suite: d.suite, key_id: d.key_id, public_key: d.public_key, created_at: d.created_at,
    identity: {algorithm: d.identity?.algorithm, public_key: d.identity?.public_key}, signature: d.signature,
  });
  const compact = text.replace(/("(?:[^"\\]|\\.)*")|[ \t\r\n]+/g, (/** @type {string} */ _, /** @type {string | undefined} */ string) => string ?? '');
  const publicKey = fromBase64(d.public_key), identityKey = fromBase64(d.identity?.public_key), signature = fromBase64(d.signature);
  if (canonical !== compact || !publicKey || !identityKey || !signature) {
    throw new Error('The sealing key document was changed since it was written: fetch it again.');
  }
  if (d.identity.algorithm !== identityAlgorithm) throw new Error(`The sealing key document's identity algorithm is not ${identityAlgorithm}.`);
  const suite = Object.hasOwn(suites, d.suite) && suites[/** @type {keyof typeof suites} */ (d.suite)];
  if (!suite) throw new Error(`The sealing key document's suite is none of ${Object.keys(suites).join(' and ')}: load the page anew.`);
  if (publicKey.length !== suite.ek || !reduced(publicKey)) throw new Error('The sealing key document has no public key of its suite: fetch it again.');
  if (toHex(sha3_256(frame(d.suite, publicKey))) !== d.key_id) {
    throw new Error("The sealing key document's key_id is not that of its public_key: fetch it again.");
  }
  const createdAt = seconds(d.created_at);
  if (createdAt === null) throw new Error("The sealing key document's created_at is not a UTC time in whole seconds.");
  if (identityKey.length !== identityKeyLength) throw new Error('The sealing key document has no identity key of ML-DSA-65: fetch it again.');
  const message = frame(documentContext, u64(1), d.suite, d.key_id, publicKey, u64(createdAt), identityAlgorithm, identityKey);
  if (!signed(identityKey, documentContext, message, signature)) {
    throw new Error("The sealing key document's signature does not verify: it was changed; fetch it again.");
  }
  const key = Object.freeze({
    suite: d.suite, keyID: d.key_id, publicKey: Object.freeze(Array.from(publicKey)), createdAt: d.created_at,
    identity: toHex(sha3_256(frame(identityAlgorithm, identityKey))),
  });
  verified.add(key);
  return key;
}

// signed reports whether a signature is a key's. The library throws on what has not
// the length of one.
/** @type {(key: Uint8Array, context: string, message: Uint8Array, signature: Uint8Array) => boolean} */
function signed(key, context, message, signature) {
  try {
    return ml_dsa65.verify(signature, message, key, {context: utf8(context)});
  } catch {
    return false;
  }
}

// reduced reports whether the ML-KEM-768 part of a key is: its 768 numbers of 12 bits
// are below q (FIPS 203 §7.2).
/** @param {Uint8Array} key */
function reduced(key) {
  for (let i = 0; i < 1152; i += 3) {
    if ((key[i] | (key[i + 1] & 15) << 8) >= 3329 || (key[i + 1] >> 4 | key[i + 2] << 4) >= 3329) return false;
  }
  return true;
}

// seconds reads YYYY-MM-DDTHH:MM:SSZ as Unix time, or returns null.
/** @param {string} text */
function seconds(text) {
  const at = new Date(text);
  return !Number.isNaN(at.getTime()) && at.toISOString() === text.replace('Z', '.000Z') ? at.getTime() / 1000 : null;
}

/**
 * Invalid has the problems of what was to be sealed: field as sealManifest names it,
 * dataKey where it is of one value, and message with the remedy. It never has a value.
 */
export class Invalid extends Error {
  /** @param {Problem[]} problems */
  constructor(problems) {
    super(problems.map(p => p.message).join(' '));
    this.problems = problems;
  }
}

/**
 * sealManifest seals values and returns the manifest as YAML.
 *
 *   key             of readSealingKey
 *   namespace       of the object; may be empty with scope Cluster only
 *   name            of the object
 *   credentialType  such as database
 *   scope           Strict (this object only, the default), Namespace or Cluster
 *   values          pairs of data key and value, as an array, Map or object; a value
 *                   is text, which is sealed as UTF-8, or a Uint8Array
 *   ttlDays         optional; the cluster's default is 90
 *   target          optional; the Secret that the operator makes of the values: {name, type, labels, annotations,
 *                   immutable}, each optional; without a name it has that of the object
 *   now             optional; when the values count as sealed
 *
 * Error: Invalid.
 * @param {{
 *   key: SealingKey, namespace?: string, name: string, credentialType: string, scope?: string,
 *   values: [string, Value][] | Map<string, Value> | Record<string, Value>, ttlDays?: number | undefined, now?: Date,
 *   target?: Target | null,
 * }} given
 * @returns {string}
 */
export function sealManifest({key, namespace = '', name, credentialType, scope = 'Strict', values, ttlDays, target = null, now = new Date()}) {
  if (!verified.has(key)) throw new Error('The sealing key was not verified: read it with readSealingKey.');
  const pairs = Array.isArray(values) || values instanceof Map ? [...values] : Object.entries(values ?? {});
  const plain = check({namespace, name, credentialType, scope, pairs, ttlDays, suite: suites[key.suite]});

  const unix = Math.floor(now.getTime() / 1000);
  const sealedAt = new Date(unix * 1000).toISOString().replace('.000Z', 'Z');
  const info = frame('latticekeep/sealed-value/info/v1', Uint8Array.of(version), key.suite, key.keyID, scope,
    scope === 'Cluster' ? '' : namespace, scope === 'Strict' ? name : '', credentialType);
  const publicKey = Uint8Array.from(key.publicKey);
  const lines = [];
  for (const [dataKey, plaintext] of plain) {
    const {enc, ciphertext} = seal(key.suite, publicKey, info, frame('latticekeep/sealed-value/aad/v1', dataKey, u64(unix)), plaintext);
    plaintext.fill(0);
    lines.push(`      ${scalar(dataKey)}:`, `        data: ${toBase64(concat(Uint8Array.of(version), enc, ciphertext))}`, `        sealedAt: ${scalar(sealedAt)}`);
  }
  return [
    'apiVersion: latticekeep.dev/v1beta1',
    'kind: SealedCredential',
    'metadata:',
    `  name: ${scalar(name)}`,
    ...(namespace === '' ? [] : [`  namespace: ${scalar(namespace)}`]),
    'spec:',
    `  credentialType: ${scalar(credentialType)}`,
    '  sealed:',
    `    keyID: ${scalar(key.keyID)}`,
    `    scope: ${scope}`,
    `    suite: ${key.suite}`,
    '    values:',
    ...lines,
    `    version: ${version}`,
    ...targetLines(target, name),
    ...(ttlDays ? [`  ttlDays: ${ttlDays}`] : []),
    '',
  ].join('\n');
}

// targetLines writes spec.target, in which what is the default is left out.
/** @type {(target: Target | null, object: string) => string[]} */
function targetLines(target, object) {
  if (!target) return [];
  /** @type {(field: string, all: Record<string, string> | undefined) => string[]} */
  const map = (field, all = {}) => {
    const pairs = Object.entries(all).sort(([a], [b]) => a < b ? -1 : 1);
    return pairs.length === 0 ? [] : [`    ${field}:`, ...pairs.map(([key, value]) => `      ${scalar(key)}: ${scalar(value)}`)];
  };
  const {name, type, immutable, labels, annotations} = target;
  const lines = [...map('annotations', annotations), ...(immutable ? ['    immutable: true'] : []), ...map('labels', labels),
    ...(name && name !== object ? [`    name: ${scalar(name)}`] : []), ...(type ? [`    type: ${scalar(type)}`] : [])];
  return lines.length === 0 ? ['  target: {}'] : ['  target:', ...lines];
}

// check returns the values as bytes by data key, in the order of the keys. Error:
// Invalid with all that is wrong.
/**
 * @param {{
 *   namespace: string, name: string, credentialType: string, scope: string, pairs: [string, Value][], ttlDays: number | undefined,
 *   suite: {enc: number},
 * }} given
 * @returns {[string, Uint8Array][]}
 */
function check({namespace, name, credentialType, scope, pairs, ttlDays, suite}) {
  /** @type {Problem[]} */
  const problems = [];
  /** @type {(field: string, message: string, dataKey?: string) => unknown} */
  const add = (field, message, dataKey) => problems.push(dataKey === undefined ? {field, message} : {field, dataKey, message});

  if (!isSubdomain(name)) add('name', "The name is not one for an object: 1 to 253 lower-case letters, digits, '-' and '.', each part beginning and ending with a letter or digit.");
  if (namespace === '' && scope !== 'Cluster') add('namespace', 'The namespace is missing: with scope Strict or Namespace the values are bound to it.');
  else if (namespace !== '' && !isLabel(namespace)) add('namespace', "The namespace is not one: 1 to 63 lower-case letters, digits and '-', beginning and ending with a letter or digit.");
  if (typeof credentialType !== 'string' || credentialType.length < 1 || credentialType.length > maxTypeLength || !/^[a-zA-Z0-9][-._a-zA-Z0-9]*$/.test(credentialType)) {
    add('credentialType', `The credential type is not 1 to ${maxTypeLength} letters, digits, '-', '.' and '_', beginning with a letter or digit.`);
  }
  if (ttlDays !== undefined && ttlDays !== null && ttlDays !== 0 && !(Number.isInteger(ttlDays) && ttlDays >= 1 && ttlDays <= maxTTLDays)) {
    add('ttlDays', `The lifetime is not 1 to ${maxTTLDays} whole days.`);
  }
  if (!scopes.includes(scope)) add('scope', 'The scope is none of Strict, Namespace and Cluster.');
  if (pairs.length < 1 || pairs.length > maxValues) add('values', `There are ${pairs.length} values; an object has 1 to ${maxValues}.`);

  /** @type {Map<string, Value>} */
  const plain = new Map();
  let total = 0;
  for (const [dataKey, value] of pairs) {
    if (typeof dataKey !== 'string' || dataKey.length > maxKeyLength || !/^[-._a-zA-Z0-9]+$/.test(dataKey)) {
      // Not repeated in the message: it may be a value in the wrong place.
      add('values', `A data key is not 1 to ${maxKeyLength} letters, digits, '-', '_' or '.'.`, dataKey);
    } else if (plain.has(dataKey)) {
      add('values', `The data key ${dataKey} is given twice: rename one, or remove it.`, dataKey);
    } else if (value instanceof Uint8Array || typeof value === 'string' && value.isWellFormed()) {
      plain.set(dataKey, value);
      const length = typeof value === 'string' ? utf8Length(value) : value.length;
      total += 4 * Math.ceil((1 + suite.enc + length + tagLength) / 3);
    } else {
      add('values', `The value of ${dataKey} is not text: half of a character is missing. Enter it again.`, dataKey);
    }
  }
  if (total > maxSealedText) add('values', 'The values together are larger than 256 KiB once sealed: split them over several objects.');
  if (problems.length > 0) throw new Invalid(problems);
  return [...plain].sort(([a], [b]) => a < b ? -1 : 1).map(([k, v]) => [k, typeof v === 'string' ? utf8(v) : v.slice()]);
}

/** @param {string} text */
const utf8Length = text => {
  let n = 0;
  for (const c of text) n += c < '\u0080' ? 1 : c < '\u0800' ? 2 : c.length === 2 ? 4 : 3;
  return n;
};

// isLabel and isSubdomain are Kubernetes' rules of names (RFC 1123).
/** @param {string} s */
const isLabel = s => typeof s === 'string' && s.length <= 63 && /^[a-z0-9]([-a-z0-9]*[a-z0-9])?$/.test(s);
/** @param {string} s */
const isSubdomain = s => typeof s === 'string' && s.length <= 253 && /^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$/.test(s);

// scalar writes a string so that every reader of YAML sees a string: as it is when
// nothing else could be meant, and otherwise as JSON, which YAML takes.
/** @param {string} text */
function scalar(text) {
  const word = /^(y|n|yes|no|on|off|true|false|null)$/i;
  return /^[A-Za-z][-._A-Za-z0-9]*$/.test(text) && !word.test(text) ? text : JSON.stringify(text);
}

// ---- types

/**
 * @typedef {{
 *   readonly suite: keyof typeof suites, readonly keyID: string, readonly publicKey: readonly number[], readonly createdAt: string,
 *   readonly identity: string,
 * }} SealingKey
 * @typedef {string | Uint8Array} Value
 * @typedef {{name?: string, type?: string, immutable?: boolean, labels?: Record<string, string>, annotations?: Record<string, string>}} Target
 * @typedef {{field: string, message: string, dataKey?: string}} Problem
 */
