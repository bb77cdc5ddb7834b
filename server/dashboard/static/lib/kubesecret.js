// Reads Kubernetes Secrets from YAML or JSON, as "latticekeep seal -f" does: what comes of each is what sealManifest
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
 * readSecrets reads v1 Secrets, which are documents of YAML or items of a List. values are pairs of data key and value,
 * which is text or, where it is none, bytes; target is what describes the Secret, or null if none can be made; left has
 * a sentence for each part that a target cannot have. Where there are several, each has a name, and the error says
 * which one is refused. Error: Refused.
 * @param {string} text
 * @returns {Secret[]}
 */
export function readSecrets(text) {
  if (text.length > maxText) throw new Refused('The text is longer than 1 MiB. Paste fewer Secrets at a time.');
  const {documents, at} = parse(text);
  const found = documents.flatMap((d, i) => {
    const which = documents.length > 1 ? `Document ${i + 1}` : '';
    return inside(which, () => items(d, at)).map((node, n, list) => ({node, which: list.length > 1 ? `${which || 'The list'}, item ${n + 1}` : which}));
  });
  /** @type {Set<string>} */
  const seen = new Set();
  return found.map(({node, which}) => inside(which, () => {
    const secret = readSecret(node, at);
    if (found.length === 1) return secret;
    if (secret.name === '') throw new Refused('The Secret has no metadata.name. Each of several needs one.');
    const place = secret.namespace + '/' + secret.name;
    if (seen.has(place)) throw new Refused('Another Secret has this name and namespace already. Remove one of the two.');
    seen.add(place);
    return secret;
  }));
}

// inside says in a refusal which of several it is about.
/** @type {<T>(which: string, read: () => T) => T} */
function inside(which, read) {
  try {
    return read();
  } catch (error) {
    if (!(error instanceof Refused) || which === '') throw error;
    throw new Refused(`${which}: ${error.message}`);
  }
}

// items returns the roots of the Secrets in a document: itself, or the items of a List.
/** @param {any} document @param {At} at @returns {any[]} */
function items(document, at) {
  checkNodes(document, at);
  const root = document.contents;
  if (!isMap(root) || root.get('kind') !== 'List' || root.get('apiVersion') !== 'v1') return [root];
  const list = entries(root, 'The List', ['apiVersion', 'kind', 'metadata', 'items'], at).get('items')?.value;
  if (!Array.isArray(list?.items) || isMap(list) || list.items.length === 0) throw new Refused(`${at(list ?? root)} has no Secrets: items is a list of them.`);
  return list.items;
}

// readSecret reads the Secret at a node.
/** @param {any} root @param {At} at @returns {Secret} */
function readSecret(root, at) {
  const secret = entries(root, 'The Secret', fields, at);
  const word = (/** @type {string} */ name) => secret.has(name) ? string(secret.get(name), name, at) : '';
  if (word('kind') !== 'Secret' || word('apiVersion') !== 'v1') {
    throw new Refused(`${at(secret.get('kind')?.value ?? root)} is not a v1 Secret: apiVersion must be v1 and kind must be Secret. Paste Secrets alone.`);
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

const mostLines = 5000; // which the page reads in a moment

// parse returns the documents that have something in them, and what says on which line a node is.
/** @param {string} text */
function parse(text) {
  const lines = new LineCounter();
  let all;
  if (text.split('\n', mostLines + 1).length > mostLines) throw new Refused(`These are more than ${mostLines} lines. Seal the file with latticekeep seal.`);
  try {
    // YAML 1.1 is what kubectl reads: "yes" and "on" are no text there either.
    all = parseAllDocuments(text, {lineCounter: lines, version: '1.1', merge: false, prettyErrors: false, logLevel: 'silent'});
  } catch {
    throw new Refused('The text cannot be read as YAML.'); // such as one that is nested too deeply
  }
  const line = (/** @type {number} */ offset) => `Line ${lines.linePos(offset).line}`;
  const documents = [...all].filter(d => d.errors.length > 0 || d.contents && !(isScalar(d.contents) && d.contents.value === null));
  documents.forEach((d, i) => inside(documents.length > 1 ? `Document ${i + 1}` : '', () => {
    const error = d.errors[0];
    if (!error) return;
    if (error.code === 'DUPLICATE_KEY') throw new Refused(`${line(error.pos[0])} has a key that is there already. Remove one of the two.`);
    throw new Refused(`${line(error.pos[0])} cannot be read as YAML${error.code === 'TAB_AS_INDENT' ? ': it is indented with a tab. Use spaces' : ''}.`);
  }));
  if (documents.length === 0) throw new Refused('There is nothing in it yet. Paste a Secret as YAML.');
  return {documents, at: (/** @type {any} */ node) => line(node?.range?.[0] ?? 0)};
}

// checkNodes refuses what stands for something else.
/** @param {any} document @param {At} at */
function checkNodes(document, at) {
  visit(document, {
    Alias: (_, node) => { throw new Refused(`${at(node)} has an alias (*). Write the value there.`); },
    Node: (_, node) => { if (node.tag) throw new Refused(`${at(node)} has a tag (!). Write the value without it.`); },
  });
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
 * @typedef {{name: string, namespace: string, values: [string, string | Uint8Array][], target: Target | null, left: string[]}} Secret
 * @typedef {{name: string, type: string, labels: Record<string, string>, annotations: Record<string, string>, immutable: boolean}} Target
 */
