// Verifies the audit log in the page, from the answers of /api/v2/audit: what an
// entry says, its place in the chain and in the tree, and who signed. Nothing here
// believes what it can compute. The formats are those of docs/formats.md; docs/audit.md
// says what each check proves. All of it proves one log: whose it is, somebody has to
// compare by the fingerprint of readPublicKey with what reached them another way.
//
// keys, below, is the answer of GET /api/v2/audit/public-key, or an array of several.
// Each function returns what it has found true, and throws Refused when it is not.
import {ml_dsa65, sha256, sha3_256} from '../vendor/noble.js';
import {concat, equal, frame, fromBase64, fromBase64URL, toBase64, toHex, u32, utf8} from './bytes.js';

/**
 * Refused says in a sentence what does not hold. part is what was checked: key, form,
 * hash, link, signature, checkpoint, inclusion, consistency or tiles.
 */
export class Refused extends Error {
  /**
   * @param {Part} part
   * @param {string} message
   */
  constructor(part, message) {
    super(message);
    this.part = part;
  }
}

const signatureLength = 3309, publicKeyLength = 1952, hashLength = 32;
const entryContext = 'latticekeep/audit/v1', batchContext = 'latticekeep/audit-batch/v1', checkpointContext = 'latticekeep/checkpoint/v1';
const zeroHash = '0'.repeat(64);

// isTime reports whether a text is RFC 3339 in UTC with six decimals, of a day that
// there is.
/** @param {string} s */
function isTime(s) {
  const at = /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$/.test(s) ? new Date(s) : new Date(NaN);
  return !Number.isNaN(at.getTime()) && at.toISOString().slice(0, 23) === s.slice(0, 23);
}

// ---- keys

/**
 * readPublicKey checks the answer of /public-key in itself and returns {chainID,
 * fingerprint, id, key}.
 * @param {PublicKey} answer
 */
export function readPublicKey(answer) {
  const {chain_id: chainID, fingerprint, key: jwk} = answer ?? {};
  const key = fromBase64URL(jwk?.pub);
  if (typeof chainID !== 'string' || jwk?.kty !== 'AKP' || jwk.alg !== 'ML-DSA-65' || key?.length !== publicKeyLength) {
    throw new Refused('key', 'This is not the public key of an audit log.');
  }
  const id = toHex(sha3_256(frame('ML-DSA-65', key)));
  if (id !== jwk.kid) throw new Refused('key', "The key's id is not that of the key.");
  if (toHex(sha3_256(frame('latticekeep/chain/v1', chainID, key))) !== fingerprint) {
    throw new Refused('key', "The fingerprint is not that of the log's id and key.");
  }
  return {chainID, fingerprint, id, key};
}

/** @param {PublicKeys} keys */
const readKeys = keys => [keys].flat().map(readPublicKey);

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

// ---- an entry

/** @typedef {(v: unknown) => boolean} Kind */
/** @type {Kind} */
const text = v => typeof v === 'string' && v.isWellFormed();
/** @type {(v: unknown) => v is number} */
const count = v => typeof v === 'number' && Number.isSafeInteger(v) && v >= 0; // what JSON.parse has kept exact
/** @type {(v: unknown) => v is Record<string, unknown>} */
const object = v => v !== null && typeof v === 'object' && !Array.isArray(v);
/** @type {(v: unknown) => v is Record<string, string>} */
const texts = v => object(v) && Object.entries(v).every(([k, x]) => text(k) && text(x));
/** @type {Kind} */
const reference = v => texts(v) && Object.keys(v).sort().join() === 'id,type';

// The members of an entry, in the order of their names, and what each is.
/** @satisfies {Record<keyof Entry, Kind>} */
const members = {
  actor: reference, attributes: texts, event_type: text, hash: text, key_id: text, outcome: text, previous_hash: text,
  request_id: text, resource: reference, salt: text, sequence: count, signature: text, source_ip: text, tenant_id: text,
  tenant_previous_hash: text, tenant_sequence: count, timestamp: text,
};
const names = /** @type {(keyof Entry)[]} */ (Object.keys(members));

// form refuses what is not an entry, down to a member that is not one.
/** @param {Entry} entry */
function form(entry) {
  const bad = !object(entry) || Object.keys(entry).length !== names.length ||
    names.some(name => !Object.hasOwn(entry, name) || !members[name](entry[name]));
  if (bad) throw new Refused('form', 'This is not an audit entry: a part is missing, added or of another kind than it must be.');
}

// canonical is RFC 8785 of what an entry has in it: texts, numbers and objects of them.
/** @type {(value: unknown) => string} */
function canonical(value) {
  if (!object(value)) return JSON.stringify(value);
  const sorted = Object.keys(value).sort(byBytes);
  return `{${sorted.map(k => `${JSON.stringify(k)}:${canonical(value[k])}`).join(',')}}`;
}

// byBytes orders texts as their UTF-8 does, which is the order of code points.
/** @type {(a: string, b: string) => number} */
function byBytes(a, b) {
  const [x, y] = [Array.from(a), Array.from(b)];
  const i = x.findIndex((c, i) => c !== y[i]);
  if (i < 0) return x.length - y.length;
  return i === y.length ? 1 : Number(x[i].codePointAt(0)) - Number(y[i].codePointAt(0));
}

// hashOf returns the SHA3-256 of all that the hash of an entry covers.
/** @param {Entry} entry */
function hashOf(entry) {
  form(entry);
  const {hash: _, signature: __, ...core} = entry;
  return sha3_256(utf8(canonical(core)));
}

/**
 * verifyHash computes the hash of an entry from all that it says. It returns the hash.
 * @param {Entry} entry
 */
export function verifyHash(entry) {
  const hash = toHex(hashOf(entry));
  if (hash !== entry.hash) throw new Refused('hash', `Entry ${entry.sequence} was altered: its hash is not that of what it says.`);
  return hash;
}

/**
 * verifySignature verifies the signature of an entry over the hash that is computed
 * from it, or over the group of entries that it was committed with. It returns {keyID,
 * entries}, entries being how many the signature covers.
 * @param {Entry} entry
 * @param {PublicKeys} keys
 */
export function verifySignature(entry, keys) {
  const hash = hashOf(entry);
  /** @param {string} why */
  const refused = why => new Refused('signature', `Entry ${entry.sequence} ${why}`);
  const key = readKeys(keys).find(k => k.id === entry.key_id);
  if (!key) throw refused("names another signing key than the log's.");
  const data = fromBase64(entry.signature);
  if (data?.length === signatureLength) {
    if (!signed(key.key, entryContext, hash, data)) throw refused("is not signed with the log's key: its signature does not verify.");
    return {keyID: key.id, entries: 1};
  }
  const malformed = () => refused('has a signature that is not one.');
  if (!data || data.length < 9 + signatureLength || data[0] !== 2) throw malformed();
  const view = new DataView(data.buffer);
  const n = view.getUint32(1), index = view.getUint32(5);
  if (n < 2 || index >= n) throw malformed();
  const root = rootOfPath(leafHash(hash), index, n, split(data.subarray(9, -signatureLength)));
  if (!root) throw malformed();
  if (!signed(key.key, batchContext, frame(batchContext, u32(n), root), data.subarray(-signatureLength))) {
    throw refused("is not of a group that was signed with the log's key: the signature does not verify.");
  }
  return {keyID: key.id, entries: n};
}

/**
 * verifyEntry does both. It returns {hash, signature}, as the two do.
 * @param {Entry} entry
 * @param {PublicKeys} keys
 */
export function verifyEntry(entry, keys) {
  const hash = verifyHash(entry);
  if (!isTime(entry.timestamp)) throw new Refused('form', `Entry ${entry.sequence} has a time that is malformed.`);
  return {hash, signature: verifySignature(entry, keys)};
}

/**
 * verifyLink verifies that an entry follows another one directly: in the whole log, in
 * that of its tenant, or both. What the one before says is hashed anew. previous is
 * null for an entry that is the first. It returns {chain, tenant}: which of the two
 * links were held against each other.
 * @param {Entry} entry
 * @param {Entry | null} previous
 */
export function verifyLink(entry, previous) {
  form(entry);
  /** @param {string} why */
  const refused = why => new Refused('link', `Entry ${entry.sequence} ${why}`);
  if (previous === null) {
    const chain = entry.sequence === 1, tenant = entry.tenant_sequence === 1;
    if (!chain && !tenant) throw refused('is not a first one: an entry before it is missing.');
    if (chain && entry.previous_hash !== zeroHash || tenant && entry.tenant_previous_hash !== zeroHash) {
      throw refused('is the first one, and yet names the hash of one before.');
    }
    return {chain, tenant};
  }
  const hash = toHex(hashOf(previous));
  const before = [previous.sequence, entry.sequence];
  const chain = entry.sequence === previous.sequence + 1;
  const tenant = entry.tenant_id === previous.tenant_id && entry.tenant_sequence === previous.tenant_sequence + 1;
  if (before[0] >= before[1] || entry.tenant_id === previous.tenant_id && entry.tenant_sequence <= previous.tenant_sequence) {
    throw refused(`does not come after entry ${previous.sequence}: one was repeated or moved.`);
  }
  if (!chain && !tenant) throw refused(`does not follow entry ${previous.sequence} directly: those between are missing here.`);
  if (chain && entry.tenant_id === previous.tenant_id && !tenant) {
    throw refused(`does not follow entry ${previous.sequence} in the log of its tenant: an entry is missing, repeated or moved.`);
  }
  if (chain && entry.previous_hash !== hash) throw refused(`does not name the hash of entry ${previous.sequence}, which is the one before.`);
  if (tenant && entry.tenant_previous_hash !== hash) {
    throw refused(`does not name the hash of entry ${previous.sequence}, which is its tenant's one before.`);
  }
  if (entry.timestamp < previous.timestamp) throw refused(`has an earlier time than entry ${previous.sequence}, which is before it.`);
  if (entry.key_id !== previous.key_id) throw refused(`names another signing key than entry ${previous.sequence}.`);
  return {chain, tenant};
}

// ---- checkpoints

const keyType = concat(Uint8Array.of(0xff), utf8('latticekeep.dev/ml-dsa-65/checkpoint/v1'));
const checkpointForm = new RegExp('^(latticekeep\\.dev/log/([^\\n/]*)/([1-9][0-9]*))\\n([1-9][0-9]*)\\n([A-Za-z0-9+/]{43}=)\\n' +
  'sequence ([1-9][0-9]*)\\nhash ([0-9a-f]{64})\\ntime ([^\\n]*)\\n$');

// micros writes a time as checkpoints do, with all six decimals.
/** @param {string} s */
const micros = s => String(s).replace(/(\.\d+)?Z$/, (_, fraction = '.') => fraction.padEnd(7, '0') + 'Z');

/**
 * verifyCheckpoint verifies the answer of /checkpoint, or the signed note alone that
 * somebody kept. It returns what the note says: {chainID, epoch, size, root, sequence,
 * hash, time, fingerprint}; root is base64, and fingerprint that of the log's key.
 * @param {Checkpoint | string} checkpoint
 * @param {PublicKeys} keys
 * @returns {VerifiedCheckpoint}
 */
export function verifyCheckpoint(checkpoint, keys) {
  const note = typeof checkpoint === 'string' ? checkpoint : checkpoint?.checkpoint;
  const malformed = () => new Refused('checkpoint', 'This is not a checkpoint of an audit log.');
  const at = typeof note === 'string' && note.isWellFormed() ? note.indexOf('\n\n') : -1;
  if (at < 0 || !note.endsWith('\n')) throw malformed();
  const signedText = note.slice(0, at + 1), lines = note.slice(at + 2, -1).split('\n');
  const m = checkpointForm.exec(signedText);
  if (!m) throw malformed();
  const [, origin, chainID, epoch, size, root, sequence, hash, time] = m;
  const c = {chainID, epoch: Number(epoch), size: Number(size), root, sequence: Number(sequence), hash, time};
  if (![c.epoch, c.size, c.sequence].every(Number.isSafeInteger) || c.sequence < c.size || !fromBase64(root) || !isTime(time)) throw malformed();

  // Others may sign it too, as witnesses do; one line must be the log's.
  /** @param {{key: Uint8Array}} key */
  const verifies = key => lines.some(line => {
    const [dash, name, data, ...more] = line.split(' ');
    const b = fromBase64(data);
    return dash === '\u2014' && name === origin && more.length === 0 && b?.length === 4 + signatureLength &&
      equal(b.subarray(0, 4), sha256(concat(utf8(origin + '\n'), keyType, key.key)).subarray(0, 4)) &&
      signed(key.key, checkpointContext, utf8(signedText), b.subarray(4));
  });
  const key = readKeys(keys).find(k => k.chainID === chainID && verifies(k));
  if (!key) throw new Refused('checkpoint', "The checkpoint is not signed with the log's key: its signature does not verify.");

  if (typeof checkpoint !== 'string') {
    const told = checkpoint;
    const same = told.epoch === c.epoch && told.sequence === c.sequence && told.hash === c.hash && told.tree_size === c.size &&
      told.root_hash === c.root && micros(told.timestamp) === time;
    if (!same) throw new Refused('checkpoint', 'What is told beside the checkpoint is not what it says.');
  }
  return {...c, fingerprint: key.fingerprint};
}

/**
 * verifyInclusion verifies that an entry is in the tree of a checkpoint: proof is the
 * answer of /proof/inclusion for its sequence and, as tree_size, the checkpoint's. It
 * returns {index, size}: the place of the entry among how many.
 * @param {{entry: Entry, proof: InclusionProof, checkpoint: Checkpoint | string, publicKeys: PublicKeys}} given
 * @returns {{index: number, size: number}}
 */
export function verifyInclusion({entry, proof, checkpoint, publicKeys}) {
  const c = verifyCheckpoint(checkpoint, publicKeys);
  const hash = hashOf(entry);
  /** @param {string} why */
  const refused = why => new Refused('inclusion', `Entry ${entry.sequence} ${why}`);
  const path = readPath(proof?.path);
  const index = proof?.leaf_index;
  if (!path || !count(index) || !count(proof.tree_size) || index >= proof.tree_size) throw refused('came with a proof that is malformed.');
  if (proof.tree_size !== c.size) throw refused(`came with a proof for a tree of ${proof.tree_size} entries; the checkpoint's has ${c.size}: ask for that one.`);
  if (proof.sequence !== entry.sequence || proof.hash !== toHex(hash)) throw refused('came with the proof of another one.');
  // A tree has no more leaves than there were sequences; in the first epoch as many.
  if (index >= entry.sequence || c.epoch === 1 && index !== entry.sequence - 1 || entry.sequence > c.sequence) {
    throw refused('is proven at a place that it cannot have.');
  }
  if (index === c.size - 1 && (entry.sequence !== c.sequence || toHex(hash) !== c.hash)) throw refused('is not the newest one that the checkpoint names.');
  const root = rootOfPath(leafHash(hash), index, c.size, path);
  if (!root || toBase64(root) !== c.root) throw refused("is not in the log's tree: the proof does not lead to the checkpoint's root.");
  return {index, size: c.size};
}

/**
 * verifyConsistency verifies that the log of one checkpoint grew out of that of an
 * older one, that is, still has all that it had: proof is the answer of
 * /proof/consistency from the size of the one to that of the other. The older one may
 * have been kept from long ago. It returns both as verifyCheckpoint does.
 * @param {{from: Checkpoint | string, to: Checkpoint | string, proof: ConsistencyProof, publicKeys: PublicKeys}} given
 * @returns {{older: VerifiedCheckpoint, newer: VerifiedCheckpoint}}
 */
export function verifyConsistency({from, to, proof, publicKeys}) {
  const older = verifyCheckpoint(from, publicKeys), newer = verifyCheckpoint(to, publicKeys);
  /** @param {string} why */
  const refused = why => new Refused('consistency', why);
  if (older.chainID !== newer.chainID) throw refused('The checkpoints are of two logs.');
  if (newer.size < older.size || newer.sequence < older.sequence || newer.epoch < older.epoch || newer.time < older.time) {
    throw refused('The log was cut: the older checkpoint knows more of it than the newer one.');
  }
  const path = readPath(proof?.path);
  if (!path || proof.from !== older.size || proof.to !== newer.size) {
    throw refused(`The proof is not one from ${older.size} to ${newer.size} entries: ask for that one.`);
  }
  const last = newer.size === older.size && (newer.sequence !== older.sequence || newer.hash !== older.hash);
  /** @param {VerifiedCheckpoint} c */
  const rootOf = c => /** @type {Uint8Array} */ (fromBase64(c.root)); // verifyCheckpoint has read it
  if (last || !grew(older.size, rootOf(older), newer.size, rootOf(newer), path)) {
    throw refused('The log was written anew: it no longer has all that the older checkpoint covers.');
  }
  return {older, newer};
}

/**
 * verifyTiles rebuilds the root of a checkpoint's tree from the tiles at its edge, as a
 * mirror does that has nothing else. tile(level, index, width) resolves to the bytes of
 * GET /api/v2/audit/tile/{level}/{index}?width={width}. It returns how many it read.
 * @param {{
 *   checkpoint: Checkpoint | string, publicKeys: PublicKeys,
 *   tile: (level: number, index: number, width: number) => Uint8Array | Promise<Uint8Array>,
 * }} given
 * @returns {Promise<number>}
 */
export async function verifyTiles({checkpoint, publicKeys, tile}) {
  const c = verifyCheckpoint(checkpoint, publicKeys);
  /** @type {Uint8Array[]} */
  const subtrees = []; // perfect ones, the largest first
  let read = 0;
  let top = 0;
  while (256 ** (top + 1) <= c.size) top++;
  for (let level = top; level >= 0; level--) {
    const hashes = Math.floor(c.size / 256 ** level), width = hashes % 256;
    if (width === 0) continue;
    const data = await tile(level, Math.floor(hashes / 256), width);
    if (!(data instanceof Uint8Array) || data.length !== width * hashLength) throw new Refused('tiles', 'A tile has not the hashes that it must have.');
    read++;
    let nodes = split(data);
    for (let size = 128; size > 0; size >>= 1) {
      if (!(width & size)) continue;
      subtrees.push(perfect(nodes.slice(0, size)));
      nodes = nodes.slice(size);
    }
  }
  const root = subtrees.reduceRight((right, left) => nodeHash(left, right));
  if (toBase64(root) !== c.root) throw new Refused('tiles', "The tiles are not of the log's tree: they do not lead to the checkpoint's root.");
  return read;
}

// ---- the tree of RFC 6962

/** @type {(data: Uint8Array) => Uint8Array} */
const leafHash = data => sha256(concat(Uint8Array.of(0), data));
/** @type {(left: Uint8Array, right: Uint8Array) => Uint8Array} */
const nodeHash = (left, right) => sha256(concat(Uint8Array.of(1), left, right));
/** @type {(nodes: Uint8Array[]) => Uint8Array} */
const perfect = nodes => nodes.length === 1 ? nodes[0] : nodeHash(perfect(nodes.slice(0, nodes.length / 2)), perfect(nodes.slice(nodes.length / 2)));

// split returns the hashes that bytes are made of; a part at the end is one too short.
/** @param {Uint8Array} b */
function split(b) {
  const hashes = [];
  for (let i = 0; i < b.length; i += hashLength) hashes.push(b.slice(i, i + hashLength));
  return hashes;
}

/** @type {(path: unknown) => Uint8Array[] | null} */
function readPath(path) {
  if (!Array.isArray(path) || path.length > 128) return null;
  const hashes = path.map(fromBase64);
  return hashes.every(h => h?.length === hashLength) ? /** @type {Uint8Array[]} */ (hashes) : null;
}

// Numbers of leaves are beyond the 32 bits of JavaScript's bit operators.
/** @param {number} n */
const odd = n => n % 2 === 1;
/** @param {number} n */
const half = n => Math.floor(n / 2);

// rootOfPath returns the root that a path leads to from leaf number index of size, or
// null when it has another number of hashes than it must (RFC 9162 §2.1.3.2).
/** @type {(leaf: Uint8Array, index: number, size: number, path: Uint8Array[]) => Uint8Array | null} */
function rootOfPath(leaf, index, size, path) {
  let at = index, last = size - 1, node = leaf;
  for (const sibling of path) {
    if (last === 0 || sibling.length !== hashLength) return null;
    if (odd(at) || at === last) {
      node = nodeHash(sibling, node);
      while (!odd(at) && at > 0) [at, last] = [half(at), half(last)];
    } else {
      node = nodeHash(node, sibling);
    }
    [at, last] = [half(at), half(last)];
  }
  return last === 0 ? node : null;
}

// grew reports whether a path shows that a tree begins with a smaller one
// (RFC 9162 §2.1.4.2).
/** @type {(from: number, fromRoot: Uint8Array, to: number, toRoot: Uint8Array, path: Uint8Array[]) => boolean} */
function grew(from, fromRoot, to, toRoot, path) {
  if (from === to) return path.length === 0 && equal(fromRoot, toRoot);
  let at = from - 1, last = to - 1;
  while (odd(at)) [at, last] = [half(at), half(last)];
  // The older tree is a subtree of the newer one when its size is a power of two.
  const hashes = at === 0 ? [fromRoot, ...path] : path;
  if (hashes.length === 0) return false;
  let older = hashes[0], newer = hashes[0];
  for (const h of hashes.slice(1)) {
    if (last === 0) return false;
    if (odd(at) || at === last) {
      older = nodeHash(h, older);
      newer = nodeHash(h, newer);
      while (!odd(at) && at > 0) [at, last] = [half(at), half(last)];
    } else {
      newer = nodeHash(newer, h);
    }
    [at, last] = [half(at), half(last)];
  }
  return last === 0 && equal(older, fromRoot) && equal(newer, toRoot);
}

// ---- types

// They say what a true answer has in it. Nothing relies on them: an answer counts as
// unknown until it is checked.
/**
 * @typedef {{chain_id: string, fingerprint: string, key: {kty: string, alg: string, kid: string, pub: string}}} PublicKey
 * @typedef {PublicKey | PublicKey[]} PublicKeys
 * @typedef {{id: string, type: string}} Reference
 * @typedef {{
 *   sequence: number, tenant_id: string, tenant_sequence: number, timestamp: string, event_type: string, outcome: string,
 *   actor: Reference, resource: Reference, attributes: Record<string, string>, source_ip: string, request_id: string, salt: string,
 *   key_id: string, previous_hash: string, tenant_previous_hash: string, hash: string, signature: string,
 * }} Entry
 * @typedef {{
 *   checkpoint: string, epoch: number, sequence: number, hash: string, tree_size: number, root_hash: string, timestamp: string,
 * }} Checkpoint
 * @typedef {{
 *   chainID: string, epoch: number, size: number, root: string, sequence: number, hash: string, time: string, fingerprint: string,
 * }} VerifiedCheckpoint
 * @typedef {{sequence: number, hash: string, leaf_index: number, tree_size: number, path: string[]}} InclusionProof
 * @typedef {{from: number, to: number, path: string[]}} ConsistencyProof
 * @typedef {'key' | 'form' | 'hash' | 'link' | 'signature' | 'checkpoint' | 'inclusion' | 'consistency' | 'tiles'} Part
 */
