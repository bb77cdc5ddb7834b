// Sealing in the page: for which key, and what is wrong with what was to be sealed. The code that seals is large, and
// is loaded when somebody seals.
import {html, useState} from '../vendor/preact.js';
import {api} from './api.js';
import {fromBase64} from '../crypto/bytes.js';
import {Fingerprint} from './log.js';
import {Dialog, Facts, Form, Hash, Input, Loaded, Time, say, toClipboard, useLoad} from './ui.js';

// load loads the code that seals and the sealing key, whose signature it verifies.
async function load(signal) {
  const [code, document] = await Promise.all([import('../crypto/sealing.js'), api('GET', '/api/v2/sealing-key', {signal, text: true})]);
  return {code, key: await code.readSealingKey(document)};
}

// useSealing is a useLoad of {code, key}.
export const useSealing = () => useLoad(load, []);

// Recipient says for which key values are sealed, and whose it is.
export const Recipient = ({of: key}) => html`
  <p>The sealing key came from the server, signed by the identity with the fingerprint below, and the signature holds. Compare it with the one that your team knows: whoever could put another key here could read what you seal.</p>
  <${Fingerprint} word="Identity" value=${key.identity} hint="The operator of this service has it from the server's first start; your repository may have it in .latticekeep.yaml." />
  <${Facts} of=${[
    ['Sealing key', html`${key.suite} <${Hash} label="Copy the key's id">${key.keyID}<//>`],
    ['Created', html`<${Time} at=${key.createdAt} />`],
  ]} />`;

// problemsOf sorts what crypto/sealing.js found wrong: {fields, values}, values by data key, or by '' where it is about
// all of them.
export function problemsOf(problems) {
  const fields = {}, values = {};
  for (const {field, dataKey, message} of problems) {
    if (field !== 'values') fields[field] = message;
    else values[dataKey ?? ''] = message;
  }
  return {fields, values};
}

// objectName makes a name of an object out of the last part of a credential's path.
const objectName = path => path.slice(path.lastIndexOf('/') + 1).toLowerCase().replace(/[^a-z0-9.]+/g, '-').replace(/^[-.]+|[-.]+$/g, '');

// CopySealed asks for the object that a credential is to become in a cluster, and copies its manifest. read resolves to
// the values as the interface has them.
export function CopySealed({of: c, read, onClose}) {
  const sealing = useSealing();
  const [form, setForm] = useState({name: objectName(c.name), namespace: ''});
  const [target, setTarget] = useState(true);
  const [wrong, setWrong] = useState({});
  const set = name => value => { setForm(f => ({...f, [name]: value})); setWrong({}); };
  const copy = async () => {
    setWrong({});
    const {code, key} = sealing.data ?? await load();
    const {values, binary_values: binary = {}} = await read();
    let manifest;
    try {
      manifest = code.sealManifest({...form, key, credentialType: c.credential_type, target: target ? {} : null,
        values: [...Object.entries(values), ...Object.entries(binary).map(([name, value]) => [name, fromBase64(value)])]});
    } catch (error) {
      if (!(error instanceof code.Invalid)) throw error;
      const found = problemsOf(error.problems);
      setWrong(found.fields);
      throw new Error(Object.values(found.values)[0] ?? 'Correct what is marked, and seal again.');
    }
    await toClipboard(manifest);
    say('Copied. The manifest is safe to keep in git');
    onClose();
  };
  return html`<${Dialog} title="Copy as SealedCredential" onClose=${onClose}>
    <${Form} onSubmit=${copy} submit="Seal and copy" cancel=${onClose} novalidate>
      <p>The values are encrypted in this page for one object in a cluster (scope Strict). Under another name or in another namespace they do not open.</p>
      <${Input} label="Namespace" maxlength="63" autocapitalize="none" error=${wrong.namespace} value=${form.namespace} onInput=${set('namespace')} autofocus />
      <${Input} label="Name" hint="Of the object, as kubectl shows it" maxlength="253" autocapitalize="none" error=${wrong.name} value=${form.name} onInput=${set('name')} />
      <div class="check"><input id="sealed-target" type="checkbox" checked=${target} onChange=${e => setTarget(e.target.checked)} /><label for="sealed-target">Have the operator make a Secret of the values (<code>spec.target</code>)</label></div>
      <details><summary>Recipient key</summary><${Loaded} of=${sealing}>${({key}) => html`<div class="stack"><${Recipient} of=${key} /></div>`}<//></details>
    <//>
  <//>`;
}
