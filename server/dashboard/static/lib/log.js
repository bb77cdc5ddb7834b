// What the pages need of the audit log: its events in words, following it, and checking
// it in the page.
import {html, useState} from '../vendor/preact.js';
import {Problem, get, queryString} from './api.js';
import {count, number} from './format.js';
import {words} from './words.js';
import {Facts, Hash, Input, Link, Name, Tag} from './ui.js';

const outcomes = {success: ['good', 'success'], denied: ['warn', 'denied'], failure: ['bad', 'failure']};

export const Outcome = ({of}) => html`<${Tag} kind=${outcomes[of]?.[0]}>${outcomes[of]?.[1] ?? words(of).toLowerCase()}<//>`;

const proofs = {
  verified: ['good', 'verified'], verifying: ['plain', 'being verified'], broken: ['bad', 'does not verify'], disabled: ['warn', 'verification is switched off'],
};

// Proof is how far the server says that it has verified the log.
export const Proof = ({of}) => html`<${Tag} kind=${proofs[of.status]?.[0]}>${proofs[of.status]?.[1] ?? of.status}<//>`;

const kind = type => words(type).replace(/^[A-Z](?![A-Z])/, c => c.toLowerCase());

// Called is what something is called, with its id on hover, or its id.
const Called = ({id, name, label}) => name ? html`<span title=${id}><${Name}>${name}<//></span>` : id && html`<${Hash} label=${label}>${id}<//>`;

// Actor is who did something; mine is the id of who looks, and name what the actor is called, if known.
export const Actor = ({of, mine, name}) => html`<span><span class="quiet">${kind(of.type)}${of.id && of.id === mine ? ' (you)' : ''}</span> <${Called} id=${of.id} name=${name} label="Copy the actor's id" /></span>`;

// What of a kind has a page of its own.
const places = {credential: id => '/vault/' + id, key: id => '/keys/' + id};

// Resource is what it was done to, and name what that is called, if known.
export function Resource({of, name}) {
  const called = html`<${Called} id=${of.id} name=${name} label="Copy the resource's id" />`;
  if (!of.id || !Object.hasOwn(places, of.type)) return html`<span><span class="quiet">${kind(of.type)}</span> ${called}</span>`;
  const to = places[of.type](encodeURIComponent(of.id));
  return html`<span>${name ? html`<span class="quiet">${kind(of.type)}</span> <${Link} to=${to} title=${of.id}><${Name}>${name}<//><//>` : html`<${Link} to=${to}>${kind(of.type)}<//> ${called}`}</span>`;
}

// Fingerprint shows one, and compares it with what somebody was given another way.
export function Fingerprint({word, value, hint}) {
  const [other, setOther] = useState('');
  const given = other.toLowerCase().replace(/[\s:]/g, '');
  return html`<div class="stack">
    <${Facts} of=${[[word, html`<${Hash} whole label="Copy the fingerprint">${value}<//>`]]} />
    <${Input} label="Compare it with the one that you were given" hint=${hint} required=${false} class="mono" autocapitalize="none" value=${other} onInput=${setOther} />
    <p role="status">${given !== '' && (given === value ? html`<${Tag} kind="good">the two are the same<//>`
      : html`<${Tag} kind="bad">the two differ<//> ${given.length < 64 ? 'A fingerprint has 64 digits and letters.' : 'Do not rely on what this page shows before you know why.'}`)}</p>
  </div>`;
}

// ---- following

const tail = '/api/v2/audit/tail';

// follow reads entries as they are written, oldest first. after is the sequence behind
// which it begins, or undefined for now. onState gets open, waiting, refused when that
// lasts, or, with the error, failed, after which nothing comes any more. The browser goes on by itself when the
// stream ends; when it is refused, the session is renewed as for any request, and it
// goes on from the last entry. It returns a function that ends it.
export function follow({after, onEntry, onState}) {
  let source, timer, ended = false, last = after, failures = 0;
  const end = () => {
    ended = true;
    clearTimeout(timer);
    source?.close();
  };
  const open = () => {
    source = new EventSource(tail + queryString({after: last}));
    source.onopen = () => { failures = 0; onState('open'); };
    source.onmessage = e => {
      const entry = JSON.parse(e.data);
      last = entry.sequence;
      onEntry(entry);
    };
    source.onerror = () => {
      if (ended) return;
      if (failures < 3) onState('waiting');
      if (source.readyState === EventSource.CLOSED) again();
    };
  };
  const again = async () => {
    let error = null;
    try {
      await get('/api/v2/auth/me'); // asks to sign in, if it has to be
    } catch (e) {
      error = e;
    }
    if (ended) return;
    if (error && [401, 403].includes(error.status)) {
      end();
      onState('failed', error);
      return;
    }
    if (failures >= 3) onState('refused');
    const wait = Math.max((error?.retryAt ?? 0) - Date.now(), 1000 * Math.min(60, 2 ** failures++));
    timer = setTimeout(open, wait);
  };
  onState('waiting');
  open();
  return end;
}

// nextOf resolves to the tenant's entry behind another one, which the log is asked for
// by following it; there is one, since asking leaves an entry. Error: Problem.
export function nextOf(sequence) {
  return new Promise((resolve, reject) => {
    const end = follow({
      after: sequence,
      onEntry: entry => { end(); resolve(entry); },
      onState: (state, error) => { if (state === 'failed') reject(error); },
    });
    setTimeout(() => { end(); reject(new Problem(0, '')); }, 15_000);
  });
}

// previousOf resolves to the tenant's entry before another one, or null if it is not in
// the database any more. Entries can have the same time, hence the search.
export async function previousOf(entry, signal) {
  let cursor;
  for (let turn = 0; turn < 10; turn++) {
    const page = await get('/api/v2/audit/logs', {to: entry.timestamp, limit: turn === 0 ? 5 : 100, cursor}, signal);
    const found = page.entries.find(e => e.tenant_sequence <= entry.tenant_sequence - 1);
    if (found) return found.tenant_sequence === entry.tenant_sequence - 1 ? found : null;
    cursor = page.next_cursor;
    if (!cursor) return null;
  }
  return null;
}

// ---- checking

// openLog fetches what checks need: the code, the log's public key, and its newest
// checkpoint, which is verified. Checkpoints are at most a second behind: for one that
// covers the entry newest it waits that long. Error: Problem, or Refused of crypto/log.js.
export async function openLog(newest, signal) {
  const code = await import('../crypto/log.js'); // a large file, which is fetched when somebody asks for a check
  const publicKey = await get('/api/v2/audit/public-key', undefined, signal);
  const {fingerprint} = code.readPublicKey(publicKey);
  for (let turn = 0; ; turn++) {
    const note = await get('/api/v2/audit/checkpoint', undefined, signal);
    const checkpoint = code.verifyCheckpoint(note, publicKey);
    if (checkpoint.sequence >= newest || turn === 3) return {code, publicKey, fingerprint, note, checkpoint};
    await new Promise(resolve => setTimeout(resolve, 600));
  }
}

// A check of an entry is {part, kind, found, proves}: kind is good, bad (it does not
// hold) or plain (it could not be made, for the reason in found).
const titles = {hash: 'Hash', signature: 'Signature', link: 'Link to the entry before', inclusion: 'Place in the signed tree'};

// checkEntry makes all checks of an entry. previous is the tenant's entry before it, null
// if the entry is the tenant's first, and undefined if it is not at hand. Error: Problem
// for what cannot be asked now.
export async function checkEntry(log, entry, previous, signal) {
  const {code, publicKey, note, checkpoint} = log;
  const checks = [];
  const check = async (part, proves, task) => {
    try {
      checks.push({part, title: titles[part], proves, ...await task()});
    } catch (error) {
      if (!(error instanceof code.Refused)) throw error;
      checks.push({part, title: titles[part], kind: 'bad', found: error.message});
    }
  };
  await check('hash', 'Nothing in this entry was changed after it was written.', () => {
    const hash = code.verifyHash(entry);
    return {kind: 'good', found: html`The SHA3-256 of all that the entry says was computed here, and is the hash that it has: <${Hash} label="Copy the hash">${hash}<//>`};
  });
  await check('signature', 'It was written by whoever holds the private key of this log.', () => {
    const {keyID, entries} = code.verifySignature(entry, publicKey);
    return {kind: 'good', found: html`The ML-DSA-65 signature ${entries > 1 ? `of the group of ${count(entries, 'entry', 'entries')} that it was written with` : 'of the hash'} verifies with the log's key <${Hash} label="Copy the key's id">${keyID}<//>`};
  });
  await check('link', previous === null ? 'Nothing was there before it.' : 'No entry of your organisation was removed, added or moved between the two.', () => {
    if (previous === undefined) return {kind: 'plain', found: 'The entry before it is not at hand, so that the link was not compared.'};
    const {chain, tenant} = code.verifyLink(entry, previous);
    if (!tenant) throw new code.Refused('link', `The server gave entry ${previous.sequence} for the one before, which is of another organisation.`);
    return {kind: 'good', found: previous === null ? 'It is the first entry of your organisation, and names none before it.'
      : html`It names the hash of <${Link} to=${'/audit/' + previous.sequence}>entry ${number(previous.sequence)}<//>, the one before in your organisation${chain ? ' and in the whole log' : ''}, which was computed anew: <${Hash} label="Copy the hash">${entry.tenant_previous_hash}<//>`};
  });
  await check('inclusion', 'It is in the log that everybody sees who has the same checkpoint, and will be missed if it is removed.', async () => {
    if (entry.sequence > checkpoint.sequence) return {kind: 'plain', found: `It is newer than the newest checkpoint, which is of entry ${number(checkpoint.sequence)}. The next one comes within a second: verify again.`};
    const proof = await get('/api/v2/audit/proof/inclusion', {sequence: entry.sequence, tree_size: checkpoint.size}, signal);
    const {index, size} = code.verifyInclusion({entry, proof, checkpoint: note, publicKeys: publicKey});
    return {kind: 'good', found: html`With ${count(proof.path.length, 'hash', 'hashes')} from the server, leaf ${number(index + 1)} of ${number(size)} leads to the root of the tree in the signed checkpoint: <code>${checkpoint.root}</code>`};
  });
  return checks;
}

// verdict sums up checks.
export function verdict(checks) {
  if (checks.some(c => c.kind === 'bad')) return 'bad';
  return checks.some(c => c.kind === 'plain' && c.part !== 'link') ? 'plain' : 'good';
}
