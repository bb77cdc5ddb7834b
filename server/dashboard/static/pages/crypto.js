// Encrypt and sign: the four operations on data that stays with whoever calls them.
import {html, useState} from '../vendor/preact.js';
import {useAccount} from '../lib/account.js';
import {post} from '../lib/api.js';
import {count, overTLS} from '../lib/format.js';
import {Brief, Secret, useBriefly} from '../lib/secret.js';
import {Copy, Empty, Field, Form, Hash, Input, Link, Page, Panel, Table, Tag, save, setQuery, useHere} from '../lib/ui.js';

const operations = {
  encrypt: ['Encrypt', Encrypt, 'crypto:encrypt'],
  decrypt: ['Decrypt', Decrypt, 'crypto:decrypt'],
  sign: ['Sign', Sign, 'crypto:sign'],
  verify: ['Verify', Verify, 'crypto:verify'],
};

// What is entered and what came of it stays while one goes from one operation to the
// other, and is forgotten when the page is left. It is in no address.
export function Crypto() {
  const account = useAccount();
  const {query} = useHere();
  const [entered, setEntered] = useState({encrypt: {text: '', key: ''}, decrypt: {text: ''}, sign: {text: ''}, verify: {text: '', pqc: '', hmac: ''}});
  const offered = Object.entries(operations).filter(([, [, , scope]]) => account.can(scope));
  const current = offered.some(([name]) => name === query.get('do')) ? query.get('do') : offered[0]?.[0];
  const [, Part] = operations[current] ?? [];
  const change = (name, fields) => setEntered(all => ({...all, [name]: {...all[name], ...fields}}));
  const takeOver = (name, fields) => {
    change(name, fields);
    setQuery({do: name});
  };
  return html`<${Page} title="Encrypt and sign" lead="Try the four operations on a text. Nothing of it is stored: what comes out is yours to keep.">
    ${!Part ? html`<${Empty} title="Your role does not allow this"><p>Ask an owner of your organisation if you need it.</p><//>` : html`
      <nav class="row tabs" aria-label="Operations">${offered.map(([name, [text]]) => html`
        <${Link} key=${name} to=${'/crypto?do=' + name} aria-current=${name === current ? 'page' : undefined}>${text}<//>`)}</nav>
      <${Part} key=${current} state=${entered[current]} set=${fields => change(current, fields)} takeOver=${takeOver} />`}
  <//>`;
}

const most = 700 * 1024;
const bytesOf = text => new TextEncoder().encode(text).length;
const bytesIn = base64 => Math.floor(base64.replace(/=+$/, '').length * 3 / 4);

const tooLong = text => bytesOf(text) > most ? `This has ${count(bytesOf(text), 'byte')}; at most ${count(most, 'byte')} (700 KiB) fit.` : '';

const Area = ({label, hint, error, value, onInput, ...more}) => html`<${Field} ...${{label, hint, error}}>${tied => html`
  <textarea dir="auto" spellcheck=${false} autocomplete="off" autocapitalize="none" required value=${value} onInput=${e => onInput(e.target.value)} ...${more} ...${tied}></textarea>`}<//>`;

// Allowed shows what makes something new only while the plan allows that.
function Allowed({children}) {
  const account = useAccount();
  return account.writes ? children
    : html`<${Empty} title="Not possible now"><p>The trial has ended: you can decrypt and verify until the operator of this service activates the plan.</p><//>`;
}

const asText = envelope => JSON.stringify(envelope, null, 2);

// Fields explains what an answer consists of: rows of a field, its value and its meaning.
const Fields = ({caption, rows}) => html`<${Table} caption=${caption} rowKey="field" rows=${rows} columns=${[
  {title: 'Field', class: 'fit', cell: r => html`<code>${r.field}</code>`},
  {title: 'Value', class: 'fit', cell: r => html`<span>${r.base64 ? html`<${Hash} label=${'Copy ' + r.field}>${r.value}<//> <span class="quiet">${count(bytesIn(r.value), 'byte')}</span>` : html`<${Hash} label=${'Copy ' + r.field}>${String(r.value)}<//>`}</span>`},
  {title: 'What it is for', cell: r => r.meaning},
]} />`;

// ---- encrypting

function Encrypt({state: {text, key, envelope}, set, takeOver}) {
  const account = useAccount();
  const encrypt = async () => {
    if (tooLong(text)) return;
    set({envelope: undefined});
    const {success, ...made} = await post('/api/v2/encryption/encrypt', {data: text, algorithm: 'ML-KEM-768', ...key && {key_id: key}});
    set({envelope: made});
  };
  return html`<${Panel} title="Encrypt"><${Allowed}>
      <${Form} onSubmit=${encrypt} submit="Encrypt">
        <${Area} label="Text" hint=${`It goes to the server${overTLS} and is not stored.`} error=${tooLong(text)} value=${text} onInput=${value => set({text: value, envelope: undefined})} />
        <${Input} label="Key" optional maxlength="128" hint=${html`The id of a named key${account.can('keys:read') && html`, as shown among the <${Link} to="/keys">keys<//>`}. Leave it empty for the default key of your organisation.`} value=${key} onInput=${value => set({key: value, envelope: undefined})} />
      <//><//>
    <//>
    ${envelope && html`<${Envelope} of=${envelope} takeOver=${account.can('crypto:decrypt') && (() => takeOver('decrypt', {text: asText(envelope)}))} />`}`;
}

const Envelope = ({of, takeOver}) => html`<${Panel} title="The envelope">
  <div role="status"><${Tag} kind="good">encrypted<//></div>
  <p>Keep all of it: only together, and only in your organisation, its parts decrypt. It reads as JSON, as decrypt takes it.</p>
  <div class="actions">
    <${Copy} text=${asText(of)} label="Copy the envelope" />
    <button type="button" onClick=${() => save('envelope.json', asText(of) + '\n', 'application/json')}>Download it</button>
    ${takeOver && html`<button type="button" onClick=${takeOver}>Decrypt this</button>`}
  </div>
  <${Fields} caption="Fields of the envelope" rows=${[
    {field: 'ciphertext_kem', base64: true, value: of.ciphertext_kem, meaning: 'A secret of this message alone, encapsulated by ML-KEM-768 (FIPS 203). Only the private key of the named version gets it out again; no quantum computer is known to help with that.'},
    {field: 'ciphertext_data', base64: true, value: of.ciphertext_data, meaning: 'Your text under AES-256-GCM, whose key HKDF-SHA-512 derives from that secret. Before it: which key and version, a salt, a commitment to the derived key, and two signatures over the whole envelope, ML-DSA-65 (FIPS 204) and HMAC-SHA-512. Both are verified before anything is decrypted.'},
    {field: 'nonce', base64: true, value: of.nonce, meaning: 'The number that AES-256-GCM begins with. It is not secret, and signed too.'},
    {field: 'algorithm', value: of.algorithm, meaning: 'The key encapsulation, always together with HKDF-SHA-512 and AES-256-GCM.'},
    {field: 'key_id', value: of.key_id, meaning: 'The key that it was encrypted with, for you to see. Decrypt goes by the signed copy in ciphertext_data.'},
    {field: 'key_version', value: of.key_version, meaning: 'The version of that key. After a rotation earlier versions still decrypt.'},
  ]} />
<//>`;

// parts are what decrypt takes.
const parts = ['ciphertext_kem', 'ciphertext_data', 'nonce'];

// read returns the parts of an envelope that was pasted, or null.
function read(text) {
  try {
    const found = JSON.parse(text);
    return parts.every(name => typeof found[name] === 'string') ? Object.fromEntries(parts.map(name => [name, found[name]])) : null;
  } catch {
    return null;
  }
}

function Decrypt({state: {text, wrong}, set}) {
  const held = useBriefly();
  const decrypt = async () => {
    held.forget();
    const envelope = read(text);
    if (!envelope) return set({wrong: 'This is not an envelope: it has to be JSON with ' + parts.join(', ') + '. Paste it whole, as encrypt answered it.'});
    held.keep((await post('/api/v2/encryption/decrypt', envelope)).data);
  };
  return html`<${Panel} title="Decrypt">
      <${Form} onSubmit=${decrypt} submit="Decrypt" texts=${{400: 'This envelope cannot be decrypted: a part of it was changed or is missing, or it is of another organisation. The service does not say which. Paste it whole, as encrypt answered it.'}}>
        <${Area} label="Envelope" hint="The JSON that encrypt answered." class="mono" error=${wrong} value=${text} onInput=${value => { held.forget(); set({text: value, wrong: undefined}); }} />
      <//>
      <div role="status">${held.value !== undefined && html`<${Tag} kind="good">decrypted: both signatures hold<//>`}</div>
      <${Brief} of=${held}>${value => html`<${Secret} name="data" value=${value} />`}<//>
    <//>`;
}

// ---- signing

function Sign({state: {text, made}, set, takeOver}) {
  const account = useAccount();
  const sign = async () => {
    if (tooLong(text)) return;
    set({made: undefined});
    const {success, ...signatures} = await post('/api/v2/encryption/sign', {data: text});
    set({made: signatures});
  };
  return html`<${Panel} title="Sign"><${Allowed}>
      <${Form} onSubmit=${sign} submit="Sign">
        <${Area} label="Text" hint="Every character counts, spaces and line breaks too." error=${tooLong(text)} value=${text} onInput=${value => set({text: value, made: undefined})} />
      <//><//>
    <//>
    ${made && html`<${Panel} title="The signatures">
      <div role="status"><${Tag} kind="good">signed<//></div>
      <p>Keep both beside the text. They belong together: verify takes no single one.</p>
      <div class="actions">
        <${Copy} text=${asText(made)} label="Copy both as JSON" />
        <button type="button" onClick=${() => save('signatures.json', asText(made) + '\n', 'application/json')}>Download them</button>
        ${account.can('crypto:verify') && html`<button type="button" onClick=${() => takeOver('verify', {text, pqc: made.pqc_signature, hmac: made.hmac_signature, valid: undefined})}>Verify this</button>`}
      </div>
      <${Fields} caption="Fields of the signatures" rows=${[
        {field: 'pqc_signature', base64: true, value: made.pqc_signature, meaning: 'ML-DSA-65 (FIPS 204), which no quantum computer is known to forge. Anybody can verify it with the public key of your organisation.'},
        {field: 'hmac_signature', base64: true, value: made.hmac_signature, meaning: 'HMAC-SHA-512 with the version of its key. It rests on another kind of mathematics, should the first ever fall. Only this service can verify it.'},
        {field: 'key_id', value: made.key_id, meaning: account.can('keys:read') ? html`Which ML-DSA-65 key signed: one of the <${Link} to="/keys">public signature keys<//>.` : 'Which ML-DSA-65 key signed.'},
      ]} />
    <//>`}`;
}

function Verify({state: {text, pqc, hmac, valid}, set}) {
  const verify = async () => {
    if (tooLong(text)) return;
    set({valid: undefined});
    const answer = await post('/api/v2/encryption/verify', {data: text, pqc_signature: pqc.trim(), hmac_signature: hmac.trim()});
    set({valid: answer.valid});
  };
  const enter = name => value => set({[name]: value, valid: undefined});
  return html`<${Panel} title="Verify">
    <${Form} onSubmit=${verify} submit="Verify">
      <${Area} label="Text" hint="Exactly what was signed." error=${tooLong(text)} value=${text} onInput=${enter('text')} />
      <${Area} label="pqc_signature" hint="ML-DSA-65, in base64." class="mono" value=${pqc} onInput=${enter('pqc')} />
      <${Area} label="hmac_signature" hint="HMAC-SHA-512, in base64." class="mono" value=${hmac} onInput=${enter('hmac')} />
    <//>
    <div role="status">${valid === true && html`<p><${Tag} kind="good">valid<//> Both signatures hold: your organisation signed exactly this text.</p>`}
      ${valid === false && html`<p><${Tag} kind="bad">not valid<//> At least one of the signatures does not belong to this text and your organisation. Look for a space or a line break more or less, and for parts that are missing.</p>`}</div>
  <//>`;
}
