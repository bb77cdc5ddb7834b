// HPKE (RFC 9180), base mode, single shot, for whoever seals: HKDF-SHA-512,
// AES-256-GCM and one of two KEMs (draft-ietf-hpke-pq). WebCrypto is not used: it is
// missing where a page came over plain HTTP, and does not have the KEMs.
import {gcm, hkdfExpand, hkdfExtract, ml_kem768, ml_kem768_x25519, sha512} from '../vendor/noble.js';
import {concat, utf8} from './bytes.js';

// The suites by name. ek is the length of the public key, enc that of what it
// encapsulates, both in bytes.
export const suites = {
  'MLKEM768-X25519': {kem: ml_kem768_x25519, id: 0x647a, ek: 1216, enc: 1120},
  MLKEM768: {kem: ml_kem768, id: 0x0041, ek: 1184, enc: 1088},
};

export const tagLength = 16;

/** @param {number} n */
const u16 = n => Uint8Array.of(n >> 8, n & 255);
const none = new Uint8Array(0);

/**
 * seal returns the encapsulated key and the ciphertext with its tag. Error: the
 * public key is not one.
 * @param {keyof typeof suites} suite
 * @param {Uint8Array} publicKey
 * @param {Uint8Array} info
 * @param {Uint8Array} aad
 * @param {Uint8Array} plaintext
 */
export function seal(suite, publicKey, info, aad, plaintext) {
  const {kem, id} = suites[suite];
  const {cipherText: enc, sharedSecret} = kem.encapsulate(publicKey);

  // The key schedule of §5.1, with neither pre-shared key nor exporter.
  const suiteID = concat(utf8('HPKE'), u16(id), u16(0x0003), u16(0x0002));
  /** @type {(salt: Uint8Array, label: string, ikm: Uint8Array) => Uint8Array} */
  const extract = (salt, label, ikm) => hkdfExtract(sha512, concat(utf8('HPKE-v1'), suiteID, utf8(label), ikm), salt);
  /** @type {(secret: Uint8Array, label: string, context: Uint8Array, n: number) => Uint8Array} */
  const expand = (secret, label, context, n) => hkdfExpand(sha512, secret, concat(u16(n), utf8('HPKE-v1'), suiteID, utf8(label), context), n);
  const context = concat(Uint8Array.of(0), extract(none, 'psk_id_hash', none), extract(none, 'info_hash', info));
  const secret = extract(sharedSecret, 'secret', none);
  const key = expand(secret, 'key', context, 32);
  const ciphertext = gcm(key, expand(secret, 'base_nonce', context, 12), aad).encrypt(plaintext);
  for (const b of [sharedSecret, secret, key]) b.fill(0);
  return {enc, ciphertext};
}
