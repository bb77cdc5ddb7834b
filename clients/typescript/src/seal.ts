// Seals values so that only the vault can open them, with the dashboard's own code.
import {readSealingKey as read} from './crypto/sealing.js';
export {Invalid, sealManifest} from './crypto/sealing.js';

/** A sealing key that was verified. */
export type SealingKey = Awaited<ReturnType<typeof read>>;

/**
 * Reads and verifies the document of `client.v2.getSealingKey()`. `fingerprint` is the identity of the deployment, which
 * reached you another way. It may be written with spaces or colons. Error: the document is not one that this identity signed.
 */
export async function readSealingKey(document: string | object, fingerprint: string): Promise<SealingKey> {
  const key = await read(document);
  if (key.identity !== fingerprint.toLowerCase().replace(/[\s:]/g, '')) {
    throw new Error('Another identity signed the sealing key: do not seal before you know why.');
  }
  return key;
}
