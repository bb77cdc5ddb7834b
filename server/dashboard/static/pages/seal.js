// Sealing in the page: values are encrypted to the public sealing key here, and what
// comes out is a manifest that only the vault can open. No request carries a value.
import {html, useEffect, useId, useRef, useState} from '../vendor/preact.js';
import {api} from '../lib/api.js';
import {count} from '../lib/format.js';
import {Fingerprint} from '../lib/log.js';
import {Rows, checkRows, fromRows, newRow} from '../lib/rows.js';
import {Choice, Copy, Facts, Form, Hash, Input, Loaded, Name, Page, Panel, Tag, Time, save, say, useLoad} from '../lib/ui.js';

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

// A row of the form keeps text as it is, but for returns and zeros; other values are kept beside the form.
const fits = value => typeof value === 'string' && !/[\r\0]/.test(value);
const encoder = new TextEncoder();

// Paste takes a whole Secret. What reads it is large, and is loaded when somebody asks for it.
function Paste({take, close}) {
  const [text, setText] = useState('');
  const [wrong, setWrong] = useState('');
  const [busy, setBusy] = useState(false);
  const id = useId(), field = useRef();
  useEffect(() => field.current.focus(), []);
  const use = async () => {
    if (busy) return;
    setBusy(true);
    let read;
    try {
      read = await import('../lib/kubesecret.js');
      take(read.readSecret(text));
    } catch (error) {
      setBusy(false);
      setWrong(read && error instanceof read.Refused ? error.message : 'What reads a Secret could not be loaded. Check your connection and try again.');
      field.current?.focus();
    }
  };
  return html`<div class="field paste">
    <label for=${id}>A Kubernetes Secret, as YAML or JSON</label>
    <textarea id=${id} ref=${field} class="concealed mono" spellcheck=${false} autocomplete="off" autocapitalize="none" value=${text} aria-invalid=${wrong ? 'true' : undefined}
      aria-describedby=${`${id}-hint ${id}-error`} onInput=${e => { setText(e.target.value); setWrong(''); }}></textarea>
    <p class="hint" id=${id + '-hint'}>Such as <code>kubectl get secret NAME -o yaml</code> prints. It is read in this page, and nothing of it is sent.</p>
    <p class="wrong" id=${id + '-error'} aria-live="polite">${wrong}</p>
    <div class="actions"><button type="button" aria-disabled=${busy} onClick=${use}>Use this Secret</button><button type="button" onClick=${close}>Cancel</button></div>
  </div>`;
}

const written = all => Object.entries(all).map(([k, v], i) => html`${i > 0 && ', '}<${Name} key=${k}>${`${k}: ${v}`}<//>`);

// Taken shows what came from a Secret beside the values: its target, and what a target cannot have.
function Taken({of: {target, left}, made, onMade}) {
  const id = useId();
  return html`<fieldset class="taken"><legend>The Secret</legend>
    ${target && html`<div class="check"><input id=${id} type="checkbox" checked=${made} onChange=${e => onMade(e.target.checked)} /><label for=${id}>Have the operator make this Secret of the values (<code>spec.target</code>)</label></div>
      ${made && html`<${Facts} of=${[
        ['Secret', target.name ? html`<${Name}>${target.name}<//>` : 'of the name of the object'],
        ['Type', target.type || 'Opaque'],
        ['Labels', Object.keys(target.labels).length > 0 && written(target.labels)],
        ['Annotations', Object.keys(target.annotations).length > 0 && written(target.annotations)],
        ['Immutable', target.immutable && 'yes'],
      ]} />
      <p class="hint">Names, labels and annotations are not encrypted. A Secret that exists already is taken over only when it has the annotation <code>latticekeep.dev/adopt</code> with the name of the object.</p>`}`}
    ${left.length > 0 && html`<ul class="list">${left.map(why => html`<li key=${why}><span><${Tag} kind="warn">left out<//> <${Name}>${why}<//></span></li>`)}</ul>`}
  </fieldset>`;
}

// Kept lists values that are no text for a field.
const Kept = ({values, onRemove}) => html`<ul class="list">${values.map(([key, bytes]) => html`<li key=${key}>
  <span><code>${key}</code> <span class="quiet">${count(bytes.length, 'byte')}, which are sealed as they are</span></span>
  <button type="button" aria-label=${`Remove the value ${key}`} onClick=${() => onRemove(key)}>Remove</button></li>`)}</ul>`;

function Manifest({code, sealingKey}) {
  const [form, setForm] = useState(blank);
  const [rows, setRows] = useState(() => [newRow()]);
  const [errors, setErrors] = useState({fields: {}, values: {}});
  const [manifest, setManifest] = useState(null);
  const [pasting, setPasting] = useState(false);
  const [taken, setTaken] = useState(null); // {target, left} of a Secret
  const [made, setMade] = useState(true); // whether its target is wanted
  const [kept, setKept] = useState([]); // pairs of key and bytes
  const box = useRef(), result = useRef();
  useEffect(() => { if (manifest) result.current?.focus(); }, [manifest]);
  const set = name => value => setForm(f => ({...f, [name]: value}));
  const refuse = found => {
    setErrors(found);
    setTimeout(() => box.current?.querySelector('[aria-invalid=true]')?.focus());
    throw new Error('Correct what is marked, and seal again. Nothing that you entered is lost.');
  };
  const take = ({name, namespace, values, target, left}) => {
    const other = values.filter(([, value]) => !fits(value)).map(([key, value]) => [key, typeof value === 'string' ? encoder.encode(value) : value]);
    setForm(f => ({...f, name: name || f.name, namespace: namespace || f.namespace}));
    setRows(values.some(([, value]) => fits(value)) ? values.filter(([, value]) => fits(value)).map(([key, value]) => newRow(key, value)) : [newRow()]);
    setKept(other);
    setTaken({target, left});
    setMade(target !== null);
    setErrors({fields: {}, values: {}});
    setManifest(null);
    setPasting(false);
    say(`${count(values.length, 'value')} added. Nothing was sent`);
    setTimeout(() => [...box.current?.querySelectorAll('input') ?? []].find(input => input.value === '' && input.required)?.focus());
  };
  const seal = () => {
    const ttlDays = form.ttlDays === '' ? undefined : Number(form.ttlDays);
    const only = kept.length > 0 && rows.every(row => row.key === '' && row.value === ''); // there is nothing else, and need not be
    const wrong = only ? {} : checkRows(rows);
    let text;
    try {
      text = code.sealManifest({...form, ttlDays, namespace: form.namespace.trim(), name: form.name.trim(), credentialType: form.credentialType.trim(), key: sealingKey,
        target: taken && made ? taken.target : null, values: [...Object.entries(fromRows(rows)), ...kept]});
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
    setKept([]);
    setManifest(m => m && {...m, forgotten: true});
    say('The values are no longer on this page');
  };
  const change = next => {
    setRows(next);
    setManifest(m => m && {...m, forgotten: false});
  };
  const {fields} = errors;
  return html`
    <${Panel} title="What to seal" actions=${!pasting && html`<button type="button" onClick=${() => setPasting(true)}>Paste a Secret</button>`}>
      ${pasting && html`<${Paste} take=${take} close=${() => setPasting(false)} />`}<div ref=${box}>
      <${Form} onSubmit=${async () => seal()} submit="Seal" novalidate>
        <div class="filters wide">
          <${Input} label="Name" hint="Of the object, as kubectl shows it" maxlength="253" autocapitalize="none" value=${form.name} onInput=${set('name')} error=${fields.name} />
          <${Input} label="Namespace" hint=${form.scope === 'Cluster' ? 'Not bound; may be left out' : 'The values open there only'} optional=${form.scope === 'Cluster'} maxlength="63" autocapitalize="none" value=${form.namespace} onInput=${set('namespace')} error=${fields.namespace} />
          <${Input} label="Credential type" hint="A label, such as database or api_key" maxlength="63" autocapitalize="none" value=${form.credentialType} onInput=${set('credentialType')} error=${fields.credentialType} />
          <${Choice} label="Scope" hint="Bound into each value. The narrowest that works is best" value=${form.scope} onInput=${set('scope')} error=${fields.scope}
            options=${Object.entries(scopes).map(([scope, text]) => [scope, `${scope}: ${text}`])} />
          <${Input} label="Lifetime in days" hint="From each rotation on; 90 if left out" optional type="number" min="1" max="3650" step="1" value=${form.ttlDays} onInput=${set('ttlDays')} error=${fields.ttlDays} />
        </div>
        <fieldset><legend>Values</legend><${Rows} rows=${rows} onChange=${change} errors=${errors.values} />
          ${kept.length > 0 && html`<${Kept} values=${kept} onRemove=${key => setKept(kept.filter(([k]) => k !== key))} />`}</fieldset>
        ${taken && html`<${Taken} of=${taken} made=${made} onMade=${setMade} />`}
      <//>
    </div><//>
    ${manifest && html`<${Panel} title="The manifest" actions=${html`<${Copy} text=${manifest.text} label="Copy the manifest" /><button type="button" onClick=${() => save(manifest.name + '.yaml', manifest.text, 'application/yaml')}>Download</button>`}>
      <p tabindex="-1" ref=${result} role="status">Sealed. No plaintext left this page: nothing was sent to the server. Apply the manifest with <code>kubectl apply -f ${manifest.name}.yaml</code>, or keep it in git.</p>
      <div class="row">${manifest.forgotten ? html`<p class="quiet">The values are no longer on this page.</p>`
        : html`<p>The values are still in the form above, in the memory of this page alone.</p><button type="button" onClick=${forget}>Forget the values</button>`}</div>
      <pre tabindex="0" class="tall" aria-label="The manifest">${manifest.text}</pre>
    <//>`}`;
}
