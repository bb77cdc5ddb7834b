// Sealing in the page: values are encrypted to the public sealing key here, and what
// comes out is a manifest that only the vault can open. No request carries a value.
import {html, useEffect, useRef, useState} from '../vendor/preact.js';
import {api} from '../lib/api.js';
import {Fingerprint} from '../lib/log.js';
import {Rows, checkRows, fromRows, newRow} from '../lib/rows.js';
import {Choice, Copy, Facts, Form, Hash, Input, Loaded, Page, Panel, Time, save, say, useLoad} from '../lib/ui.js';

const scopes = {
  Strict: 'this object only', Namespace: 'any object of this namespace', Cluster: 'any object of any namespace',
};

const blank = {namespace: '', name: '', credentialType: '', scope: 'Strict', ttlDays: ''};

export function Seal() {
  // The code for sealing is large, and comes with this page alone.
  const sealing = useLoad(async signal => {
    const [code, document] = await Promise.all([import('../crypto/sealing.js'), api('GET', '/api/v2/sealing-key', {signal, text: true})]);
    return {code, key: await code.readSealingKey(document)};
  }, []);
  return html`<${Page} title="Seal in the browser" back=${{to: '/cluster', text: 'Cluster'}}
      lead="Values become a SealedCredential manifest, which is safe to keep in git. They are encrypted in this page: they are not sent to the server, and only the vault can open them.">
    <${Loaded} of=${sealing} lines=${5}>${({code, key}) => html`<${Key} of=${key} /><${Manifest} code=${code} sealingKey=${key} />`}<//>
  <//>`;
}

const Key = ({of: key}) => html`<${Panel} title="Recipient key">
  <p>The sealing key came from the server, signed by the identity with the fingerprint below, and the signature holds. Compare it with the one that your team knows: whoever could put another key here could read what you seal.</p>
  <${Fingerprint} word="Identity" value=${key.identity} hint="The operator of this service has it from the server's first start; your repository may have it in .latticekeep.yaml." />
  <${Facts} of=${[
    ['Sealing key', html`${key.suite} <${Hash} label="Copy the key's id">${key.keyID}<//>`],
    ['Created', html`<${Time} at=${key.createdAt} />`],
  ]} />
<//>`;

// problemsBy sorts what crypto/sealing.js found wrong: by field, and by row of a value.
function problemsBy(problems, rows) {
  const fields = {}, values = {};
  for (const {field, dataKey, message} of problems) {
    if (field !== 'values') fields[field] = message;
    else values[rows.find(row => row.key === dataKey)?.id ?? ''] = message;
  }
  return {fields, values};
}

function Manifest({code, sealingKey}) {
  const [form, setForm] = useState(blank);
  const [rows, setRows] = useState(() => [newRow()]);
  const [errors, setErrors] = useState({fields: {}, values: {}});
  const [manifest, setManifest] = useState(null);
  const box = useRef(), result = useRef();
  useEffect(() => { if (manifest) result.current?.focus(); }, [manifest]);
  const set = name => value => setForm(f => ({...f, [name]: value}));
  const refuse = found => {
    setErrors(found);
    setTimeout(() => box.current?.querySelector('[aria-invalid=true]')?.focus());
    throw new Error('Correct what is marked, and seal again. Nothing that you entered is lost.');
  };
  const seal = () => {
    const ttlDays = form.ttlDays === '' ? undefined : Number(form.ttlDays);
    const wrong = checkRows(rows);
    let text;
    try {
      text = code.sealManifest({...form, ttlDays, namespace: form.namespace.trim(), name: form.name.trim(), credentialType: form.credentialType.trim(), key: sealingKey, values: fromRows(rows)});
    } catch (error) {
      if (!(error instanceof code.Invalid)) throw error;
      const found = problemsBy(error.problems, rows);
      refuse({fields: found.fields, values: Object.keys(wrong).length > 0 ? wrong : found.values}); // the rows' own words are nearer
    }
    if (Object.keys(wrong).length > 0) refuse({fields: {}, values: wrong});
    setErrors({fields: {}, values: {}});
    setManifest({text, name: form.name.trim()});
  };
  const forget = () => {
    setRows([newRow()]);
    setManifest(m => m && {...m, forgotten: true});
    say('The values are no longer on this page');
  };
  const change = next => {
    setRows(next);
    setManifest(m => m && {...m, forgotten: false});
  };
  const {fields} = errors;
  return html`
    <${Panel} title="What to seal"><div ref=${box}>
      <${Form} onSubmit=${async () => seal()} submit="Seal" novalidate>
        <div class="filters wide">
          <${Input} label="Name" hint="Of the object, as kubectl shows it" maxlength="253" autocapitalize="none" value=${form.name} onInput=${set('name')} error=${fields.name} />
          <${Input} label="Namespace" hint=${form.scope === 'Cluster' ? 'Not bound; may be left out' : 'The values open there only'} optional=${form.scope === 'Cluster'} maxlength="63" autocapitalize="none" value=${form.namespace} onInput=${set('namespace')} error=${fields.namespace} />
          <${Input} label="Credential type" hint="A label, such as database or api_key" maxlength="63" autocapitalize="none" value=${form.credentialType} onInput=${set('credentialType')} error=${fields.credentialType} />
          <${Choice} label="Scope" hint="Bound into each value. The narrowest that works is best" value=${form.scope} onInput=${set('scope')} error=${fields.scope}
            options=${Object.entries(scopes).map(([scope, text]) => [scope, `${scope}: ${text}`])} />
          <${Input} label="Lifetime in days" hint="From each rotation on; 90 if left out" optional type="number" min="1" max="3650" step="1" value=${form.ttlDays} onInput=${set('ttlDays')} error=${fields.ttlDays} />
        </div>
        <fieldset><legend>Values</legend><${Rows} rows=${rows} onChange=${change} errors=${errors.values} /></fieldset>
      <//>
    </div><//>
    ${manifest && html`<${Panel} title="The manifest" actions=${html`<${Copy} text=${manifest.text} label="Copy the manifest" /><button type="button" onClick=${() => save(manifest.name + '.yaml', manifest.text, 'application/yaml')}>Download</button>`}>
      <p tabindex="-1" ref=${result} role="status">Sealed. No plaintext left this page: nothing was sent to the server. Apply the manifest with <code>kubectl apply -f ${manifest.name}.yaml</code>, or keep it in git.</p>
      <div class="row">${manifest.forgotten ? html`<p class="quiet">The values are no longer on this page.</p>`
        : html`<p>The values are still in the form above, in the memory of this page alone.</p><button type="button" onClick=${forget}>Forget the values</button>`}</div>
      <pre tabindex="0" class="tall" aria-label="The manifest">${manifest.text}</pre>
    <//>`}`;
}
