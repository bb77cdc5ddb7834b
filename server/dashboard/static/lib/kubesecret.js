// Reads a Kubernetes Secret from YAML or JSON, as "latticekeep seal -f" does: what comes of it is what sealManifest
// takes. Nothing is sent, and no message has a value or anything else of the text but names of fields.
import {LineCounter, isMap, isScalar, parseAllDocuments, visit} from '../vendor/yaml.js';
import {fromBase64} from '../crypto/bytes.js';

const maxText = 1 << 20;

/** Refused says why a text is not taken, with the line of it. */
export class Refused extends Error {}

// Types of Secrets that a target can have, and those that are never sealed.
const types = ['Opaque', 'kubernetes.io/tls', 'kubernetes.io/dockerconfigjson', 'kubernetes.io/basic-auth', 'kubernetes.io/ssh-auth'];
const tokens = {
  'kubernetes.io/service-account-token': 'A ServiceAccount token is not sealed: its cluster issues and ends it. Mount a projected token instead.',
  'bootstrap.kubernetes.io/token': 'A bootstrap token is not sealed: it lets nodes join one cluster. Make it there with kubeadm.',
};

// What a Secret has. Other fields are refused, as the API server does: the name may be a mistake in that of a value.
const fields = ['apiVersion', 'kind', 'metadata', 'type', 'data', 'stringData', 'immutable'];
const metadata = ['name', 'namespace', 'labels', 'annotations', 'generateName', 'selfLink', 'uid', 'resourceVersion', 'generation', 'creationTimestamp',
  'deletionTimestamp', 'deletionGracePeriodSeconds', 'ownerReferences', 'finalizers', 'managedFields'];

// What the target of a SealedCredential takes of labels and annotations.
const maxMetadata = 32, maxMetadataKey = 317, maxLabel = 63, maxAnnotation = 4096;
const reserved = /^([^/]*[.])?(kubernetes[.]io|k8s[.]io|latticekeep[.]dev)\//;
const dropped = /** @type {(name: string) => boolean} */ name => name.startsWith('sealedsecrets.bitnami.com/') || name === 'kubectl.kubernetes.io/last-applied-configuration';

/**
 * readSecret reads one v1 Secret. values are pairs of data key and value, which is text or, where it is none, bytes;
 * target is what describes the Secret, or null if none can be made; left has a sentence for each part that a target
 * cannot have. Error: Refused.
 * @param {string} text
 * @returns {{name: string, namespace: string, values: [string, string | Uint8Array][], target: Target | null, left: string[]}}
 */
export function readSecret(text) {
  if (text.length > maxText) throw new Refused('The text is longer than 1 MiB. One Secret is at most that.');
  const lines = new LineCounter();
  const {root, at} = one(text, lines);
  const secret = entries(root, 'The Secret', fields, at);
  const word = (/** @type {string} */ name) => secret.has(name) ? string(secret.get(name), name, at) : '';
  if (word('kind') !== 'Secret' || word('apiVersion') !== 'v1') {
    throw new Refused(`${at(secret.get('kind')?.value ?? root)} is not a v1 Secret: apiVersion must be v1 and kind must be Secret. Paste one Secret, not a list or another kind.`);
  }
  const type = word('type');
  if (Object.hasOwn(tokens, type)) throw new Refused(tokens[/** @type {keyof typeof tokens} */ (type)]);

  const meta = part(secret, 'metadata', metadata, at);
  const name = meta.has('name') ? string(meta.get('name'), 'metadata.name', at) : '';
  const namespace = meta.has('namespace') ? string(meta.get('namespace'), 'metadata.namespace', at) : '';
  /** @type {Map<string, string | Uint8Array>} */
  const values = new Map();
  for (const [key, entry] of part(secret, 'data', null, at)) {
    const bytes = fromBase64(string(entry, `data.${key}`, at).replace(/[\r\n]/g, ''));
    if (!bytes) throw new Refused(`${at(entry.value)} is not base64: data.${key} holds the value in base64. Text stands in stringData.`);
    values.set(key, asText(bytes));
  }
  for (const [key, entry] of part(secret, 'stringData', null, at)) values.set(key, string(entry, `stringData.${key}`, at)); // stringData goes before data, as in the API server
  if (values.size === 0) throw new Refused('The Secret has no values: data and stringData are empty.');

  /** @type {string[]} */
  const left = [];
  if (type !== '' && !types.includes(type)) {
    left.push(`No target Secret is made: a target has no type ${type}. If its reader takes another type, such as Opaque, change the type.`);
    return {name, namespace, values: [...values], target: null, left};
  }
  /** @type {Target} */
  const target = {
    name, type: type === 'Opaque' ? '' : type, immutable: boolean(secret.get('immutable'), at),
    labels: allowed(part(meta, 'labels', null, at), 'label', maxLabel, left, at), annotations: allowed(part(meta, 'annotations', null, at), 'annotation', maxAnnotation, left, at),
  };
  return {name, namespace, values: [...values], target, left};
}

const mostLines = 5000; // which the page reads in a moment; a Secret has hardly more

// one returns the root of the only document, and what says on which line something is.
/** @param {string} text @param {LineCounter} lines */
function one(text, lines) {
  let documents;
  if (text.split('\n', mostLines + 1).length > mostLines) throw new Refused(`These are more than ${mostLines} lines. Seal the file with latticekeep seal.`);
  try {
    // YAML 1.1 is what kubectl reads: "yes" and "on" are no text there either.
    documents = parseAllDocuments(text, {lineCounter: lines, version: '1.1', merge: false, prettyErrors: false, logLevel: 'silent'});
  } catch {
    throw new Refused('The text cannot be read as YAML.'); // such as one that is nested too deeply
  }
  const line = (/** @type {number} */ offset) => `Line ${lines.linePos(offset).line}`;
  const full = [...documents].filter(d => d.errors.length > 0 || d.contents && !(isScalar(d.contents) && d.contents.value === null));
  for (const d of full) {
    const error = d.errors[0];
    if (!error) continue;
    if (error.code === 'DUPLICATE_KEY') throw new Refused(`${line(error.pos[0])} has a key that is there already. Remove one of the two.`);
    throw new Refused(`${line(error.pos[0])} cannot be read as YAML${error.code === 'TAB_AS_INDENT' ? ': it is indented with a tab. Use spaces' : ''}.`);
  }
  if (full.length === 0) throw new Refused('There is nothing in it yet. Paste a Secret as YAML.');
  if (full.length > 1) throw new Refused(`${line(full[1].contents.range[0])} begins another document. Paste one Secret at a time.`);
  visit(full[0], {
    Alias: (_, node) => { throw new Refused(`${line(node.range[0])} has an alias (*). Write the value there.`); },
    Node: (_, node) => { if (node.tag) throw new Refused(`${line(node.range[0])} has a tag (!). Write the value without it.`); },
  });
  return {root: full[0].contents, at: (/** @type {any} */ node) => line(node?.range?.[0] ?? 0)};
}

/**
 * entries returns the entries of a map by name: {key, value} of nodes. known has the names that there can be; null are all.
 * @param {any} node @param {string} what @param {string[] | null} known @param {At} at
 * @returns {Map<string, Entry>}
 */
function entries(node, what, known, at) {
  if (!isMap(node)) throw new Refused(`${at(node)} is not what is expected: ${what} is a map of names and values.`);
  /** @type {Map<string, Entry>} */
  const all = new Map();
  for (const {key, value} of node.items) {
    if (!isScalar(key) || typeof key.value !== 'string') throw new Refused(`${at(key)} has a key that is not text. Put it in quotes.`);
    if (known && !known.includes(key.value)) throw new Refused(`${at(key)} has a field that a Secret has not. Look whether it is indented as it should be.`);
    all.set(key.value, {key, value});
  }
  return all;
}

/** @type {(of: Map<string, Entry>, name: string, known: string[] | null, at: At) => Map<string, Entry>} */
function part(of, name, known, at) {
  const entry = of.get(name);
  if (!entry || !entry.value || isScalar(entry.value) && entry.value.value === null) return new Map();
  return entries(entry.value, name, known, at);
}

// string returns the text of an entry. A plain scalar that is a number or a truth value is none, as for kubectl.
/** @type {(entry: Entry | undefined, what: string, at: At) => string} */
function string(entry, what, at) {
  const node = entry?.value;
  if (isScalar(node)) {
    if (typeof node.value === 'string') return node.value;
    if (node.value instanceof Date && node.type === 'PLAIN') return node.source ?? '';
  }
  throw new Refused(`${at(node ?? entry?.key)} has no text: ${what} is to be text. Put it in quotes.`);
}

/** @type {(entry: Entry | undefined, at: At) => boolean} */
function boolean(entry, at) {
  const value = entry?.value?.value ?? false;
  if (typeof value !== 'boolean') throw new Refused(`${at(entry?.value)} is neither true nor false: immutable is one of the two.`);
  return value;
}

// asText returns bytes as text if they are UTF-8.
/** @type {(bytes: Uint8Array) => string | Uint8Array} */
function asText(bytes) {
  try {
    return new TextDecoder('utf-8', {fatal: true, ignoreBOM: true}).decode(bytes);
  } catch {
    return bytes;
  }
}

// allowed returns the labels or annotations that a target may have, and adds a sentence for each other one to left.
/** @type {(all: Map<string, Entry>, kind: string, longest: number, left: string[], at: At) => Record<string, string>} */
function allowed(all, kind, longest, left, at) {
  /** @type {Record<string, string>} */
  const kept = {};
  const length = (/** @type {string} */ s) => new TextEncoder().encode(s).length;
  for (const name of [...all.keys()].sort()) {
    const value = string(all.get(name), `the ${kind} ${name.slice(0, 100)}`, at);
    const recommended = kind === 'label' && name.startsWith('app.kubernetes.io/') && name !== 'app.kubernetes.io/managed-by';
    if (dropped(name)) continue;
    if (length(name) > maxMetadataKey || length(value) > longest || reserved.test(name) && !recommended) left.push(`The ${kind} ${name.slice(0, 100)} is left out: a target does not take it.`);
    else if (Object.keys(kept).length === maxMetadata) left.push(`The ${kind} ${name.slice(0, 100)} is left out: a target takes only ${maxMetadata} ${kind}s.`);
    else kept[name] = value;
  }
  return kept;
}

/**
 * @typedef {{key: any, value: any}} Entry
 * @typedef {(node: any) => string} At
 * @typedef {{name: string, type: string, labels: Record<string, string>, annotations: Record<string, string>, immutable: boolean}} Target
 */
