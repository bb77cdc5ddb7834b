export { gcm } from "@noble/ciphers/aes.js";
export { extract as hkdfExtract, expand as hkdfExpand } from "@noble/hashes/hkdf.js";
export { sha256, sha512 } from "@noble/hashes/sha2.js";
export { sha3_256 } from "@noble/hashes/sha3.js";
export { ml_dsa65 } from "@noble/post-quantum/ml-dsa.js";
export { ml_kem768 } from "@noble/post-quantum/ml-kem.js";
export { ml_kem768_x25519 } from "@noble/post-quantum/hybrid.js";
