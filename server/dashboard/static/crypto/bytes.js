// Bytes and how they are written. A decoder takes the one spelling that the encoder
// writes, and gives null for any other.
//
// The comments in these files that begin with two stars say types: the client in
// TypeScript is checked with them and has this code, too.

const encoder = new TextEncoder();

/**
 * utf8 returns the bytes of a text, which has no half of a surrogate pair: the
 * encoder would put another character in its place.
 * @param {string} text
 */
export function utf8(text) {
  if (!text.isWellFormed()) throw new Error('The text is not valid Unicode: half of a character is missing.');
  return encoder.encode(text);
}

/** @param {...Uint8Array} parts */
export function concat(...parts) {
  const all = new Uint8Array(parts.reduce((n, p) => n + p.length, 0));
  let at = 0;
  for (const p of parts) {
    all.set(p, at);
    at += p.length;
  }
  return all;
}

/** @type {(a: Uint8Array, b: Uint8Array) => boolean} */
export const equal = (a, b) => a.length === b.length && a.every((x, i) => x === b[i]);

/** @param {number} n */
export function u32(n) {
  const b = new Uint8Array(4);
  new DataView(b.buffer).setUint32(0, n);
  return b;
}

/**
 * u64 writes an integer that JavaScript keeps exact, a negative one in two's complement.
 * @param {number} n
 */
export function u64(n) {
  if (!Number.isSafeInteger(n)) throw new Error('The number is not an integer below 2^53.');
  const b = new Uint8Array(8);
  new DataView(b.buffer).setBigInt64(0, BigInt(n));
  return b;
}

/**
 * frame joins a label and fields, each behind its length, as everything is joined
 * that is hashed or signed here. Fields are bytes or texts.
 * @type {(label: string, ...fields: (string | Uint8Array)[]) => Uint8Array<ArrayBuffer>}
 */
export const frame = (label, ...fields) => concat(...[label, ...fields].flatMap(f => {
  const b = typeof f === 'string' ? utf8(f) : f;
  return [u32(b.length), b];
}));

/** @type {(b: Uint8Array) => string} */
export const toHex = b => Array.from(b, x => x.toString(16).padStart(2, '0')).join('');

/** @param {unknown} text */
export function fromHex(text) {
  if (typeof text !== 'string' || !/^([0-9a-f]{2})*$/.test(text)) return null;
  return Uint8Array.from(text.match(/../g) ?? [], pair => parseInt(pair, 16));
}

/** @param {Uint8Array} b */
export function toBase64(b) {
  let binary = '';
  for (let i = 0; i < b.length; i += 0x8000) binary += String.fromCharCode(...b.subarray(i, i + 0x8000));
  return btoa(binary);
}

/** @param {unknown} text */
export function fromBase64(text) {
  if (typeof text !== 'string') return null;
  try {
    const b = Uint8Array.from(atob(text), c => c.charCodeAt(0));
    return toBase64(b) === text ? b : null;
  } catch {
    return null;
  }
}

/**
 * fromBase64URL reads base64url without padding.
 * @param {unknown} text
 */
export function fromBase64URL(text) {
  if (typeof text !== 'string' || !/^[-_0-9A-Za-z]*$/.test(text)) return null;
  return fromBase64(text.replaceAll('-', '+').replaceAll('_', '/') + '='.repeat(-text.length & 3));
}
