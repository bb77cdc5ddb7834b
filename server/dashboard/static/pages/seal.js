// Sealing in the page: values are encrypted to the public sealing key here, and what
// comes out is a manifest that only the vault can open. No request carries a value.
import {html, useEffect, useId, useRef, useState} from '../vendor/preact.js';
import {count, visible} from '../lib/format.js';
import {Rows, checkRows, fromRows, newRow} from '../lib/rows.js';
import {Recipient, problemsOf, useSealing} from '../lib/sealing.js';
import {Choice, Copy, Facts, Form, Input, Loaded, Name, Page, Panel, Tag, save, say} from '../lib/ui.js';

const scopes = {
  Strict: 'this object only', Namespace: 'any object of this namespace', Cluster: 'any object of any namespace',
};

const blank = {namespace: '', name: '', credentialType: '', scope: 'Strict', ttlDays: ''};

export function Seal() {
  const sealing = useSealing();
  return html`<${Page} title="Seal in the browser" back=${{to: '/cluster', text: 'Cluster'}}
      lead="Values become a SealedCredential manifest, which is safe to keep in git. They are encrypted in this page: they are not sent to the server, and only the vault can open them.">
    <${Loaded} of=${sealing} lines=${5}>${({code, key}) => html`<${Panel} title="Recipient key"><${Recipient} of=${key} /><//><${Manifest} code=${code} sealingKey=${key} />`}<//>
  <//>`;
}

// A row of the form keeps text as it is, but for returns and zeros; other values are kept beside the form.
const fits = value => typeof value === 'string' && !/[\r\0]/.test(value);
const encoder = new TextEncoder();

// Paste takes whole Secrets. What reads them is large, and is loaded when somebody asks for it.
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
      take(read.readSecrets(text));
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
    <p class="hint" id=${id + '-hint'}>Such as <code>kubectl get secret NAME -o yaml</code> prints. Several may stand in one text, with <code>---</code> between them or as a List. It is read in this page, and nothing of it is sent.</p>
    <p class="wrong" id=${id + '-error'} aria-live="polite">${wrong}</p>
    <div class="actions"><button type="button" aria-disabled=${busy} onClick=${use}>Use this Secret</button><button type="button" onClick=${close}>Cancel</button></div>
  </div>`;
}

const written = all => Object.entries(all).map(([k, v], i) => html`${i > 0 && ', '}<${Name} key=${k}>${`${k}: ${v}`}<//>`);

const adopting = html`Names, labels and annotations are not encrypted. A Secret that exists already is taken over only when it has the annotation <code>latticekeep.dev/adopt</code> with the name of the object.`;

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
      <p class="hint">${adopting}</p>`}`}
    ${left.length > 0 && html`<ul class="list">${left.map(why => html`<li key=${why}><span><${Tag} kind="warn">left out<//> <${Name}>${why}<//></span></li>`)}</ul>`}
  </fieldset>`;
}

// Kept lists values that are no text for a field.
const Kept = ({values, onRemove}) => html`<ul class="list">${values.map(([key, bytes]) => html`<li key=${key}>
  <span><code>${key}</code> <span class="quiet">${count(bytes.length, 'byte')}, which are sealed as they are</span></span>
  <button type="button" aria-label=${`Remove the value ${key}`} onClick=${() => onRemove(key)}>Remove</button></li>`)}</ul>`;

// Several lists Secrets, each of which becomes an object.
const Several = ({of, made, onMade, onRemove}) => html`<fieldset class="taken"><legend>${count(of.length, 'Secret')}</legend>
  <ul class="list">${of.map(s => html`<li key=${s.namespace + '/' + s.name}><div class="grow">
      <span><strong><${Name}>${s.name}<//></strong> ${s.namespace && html`<span class="quiet">in <${Name}>${s.namespace}<//></span> `}<span class="quiet">${count(s.values.length, 'value')}${s.target?.type && `, type ${s.target.type}`}</span></span>
      ${s.left.map(why => html`<p key=${why}><${Tag} kind="warn">left out<//> <${Name}>${why}<//></p>`)}</div>
    <button type="button" aria-label=${visible(`Remove the Secret ${s.name}`)} onClick=${() => onRemove(s)}>Remove</button></li>`)}</ul>
  <div class="check"><input id="targets" type="checkbox" checked=${made} onChange=${e => onMade(e.target.checked)} /><label for="targets">Have the operator make these Secrets of the values (<code>spec.target</code>)</label></div>
  ${made && html`<p class="hint">${adopting}</p>`}
</fieldset>`;

function Manifest({code, sealingKey}) {
  const [form, setForm] = useState(blank);
  const [rows, setRows] = useState(() => [newRow()]);
  const [errors, setErrors] = useState({fields: {}, values: {}});
  const [manifest, setManifest] = useState(null);
  const [pasting, setPasting] = useState(false);
  const [taken, setTaken] = useState(null); // {target, left} of a Secret
  const [made, setMade] = useState(true); // whether its target is wanted
  const [kept, setKept] = useState([]); // pairs of key and bytes
  const [several, setSeveral] = useState(null); // Secrets, when more than one was pasted
  const box = useRef(), result = useRef();
  useEffect(() => { if (manifest) result.current?.focus(); }, [manifest]);
  const set = name => value => setForm(f => ({...f, [name]: value}));
  const refuse = found => {
    setErrors(found);
    setTimeout(() => box.current?.querySelector('[aria-invalid=true]')?.focus());
    throw new Error('Correct what is marked, and seal again. Nothing that you entered is lost.');
  };
  const take = secrets => {
    const [{name, namespace, values, target, left}] = secrets;
    const other = values.filter(([, value]) => !fits(value)).map(([key, value]) => [key, typeof value === 'string' ? encoder.encode(value) : value]);
    const alone = secrets.length === 1;
    setSeveral(alone ? null : secrets);
    if (alone) setForm(f => ({...f, name: name || f.name, namespace: namespace || f.namespace}));
    setRows(alone && values.some(([, value]) => fits(value)) ? values.filter(([, value]) => fits(value)).map(([key, value]) => newRow(key, value)) : [newRow()]);
    setKept(alone ? other : []);
    setTaken(alone ? {target, left} : null);
    setMade(alone ? target !== null : true);
    setErrors({fields: {}, values: {}});
    setManifest(null);
    setPasting(false);
    say(`${alone ? count(values.length, 'value') : count(secrets.length, 'Secret')} added. Nothing was sent`);
    setTimeout(() => [...box.current?.querySelectorAll('input') ?? []].find(input => input.value === '' && input.required)?.focus());
  };
  // sealed returns the manifest of an object. Error: problems of the form, or one of what else is in the object.
  const sealed = object => code.sealManifest({
    ...form, credentialType: form.credentialType.trim(), ttlDays: form.ttlDays === '' ? undefined : Number(form.ttlDays), key: sealingKey, ...object,
  });
  const sealSeveral = () => several.map(s => {
    try {
      return sealed({name: s.name, namespace: s.namespace || form.namespace.trim(), values: s.values, target: made ? s.target : null});
    } catch (error) {
      if (!(error instanceof code.Invalid)) throw error;
      const {fields, values} = problemsOf(error.problems);
      const own = [fields.name, s.namespace && fields.namespace, ...Object.values(values)].find(Boolean);
      if (own) throw new Error(visible(`${s.name}: ${own}`));
      return refuse({fields, values: {}});
    }
  }).join('---\n');
  const sealOne = () => {
    const only = kept.length > 0 && rows.every(row => row.key === '' && row.value === ''); // there is nothing else, and need not be
    const wrong = only ? {} : checkRows(rows);
    let text;
    try {
      text = sealed({name: form.name.trim(), namespace: form.namespace.trim(), target: taken && made ? taken.target : null, values: [...Object.entries(fromRows(rows)), ...kept]});
    } catch (error) {
      if (!(error instanceof code.Invalid)) throw error;
      const {fields, values} = problemsOf(error.problems);
      const byRow = Object.fromEntries(Object.entries(values).map(([key, message]) => [rows.find(row => row.key === key && key !== '')?.id ?? '', message]));
      refuse({fields, values: Object.keys(wrong).length > 0 ? wrong : byRow}); // the rows' own words are nearer
    }
    if (Object.keys(wrong).length > 0) refuse({fields: {}, values: wrong});
    return text;
  };
  const seal = () => {
    const text = several ? sealSeveral() : sealOne();
    setErrors({fields: {}, values: {}});
    setManifest({text, name: several ? 'sealed-credentials' : form.name.trim()});
  };
  const forget = () => {
    setRows([newRow()]);
    setKept([]);
    setSeveral(null);
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
          ${!several && html`<${Input} label="Name" hint="Of the object, as kubectl shows it" maxlength="253" autocapitalize="none" value=${form.name} onInput=${set('name')} error=${fields.name} />`}
          ${(!several || several.some(s => s.namespace === '')) && html`<${Input} label="Namespace" hint=${form.scope === 'Cluster' ? 'Not bound; may be left out' : several ? 'Of the Secrets that name none. The values open there only' : 'The values open there only'} optional=${form.scope === 'Cluster'}
            maxlength="63" autocapitalize="none" value=${form.namespace} onInput=${set('namespace')} error=${fields.namespace} />`}
          <${Input} label="Credential type" hint="A label, such as database or api_key" maxlength="63" autocapitalize="none" value=${form.credentialType} onInput=${set('credentialType')} error=${fields.credentialType} />
          <${Choice} label="Scope" hint="Bound into each value. The narrowest that works is best" value=${form.scope} onInput=${set('scope')} error=${fields.scope}
            options=${Object.entries(scopes).map(([scope, text]) => [scope, `${scope}: ${text}`])} />
          <${Input} label="Lifetime in days" hint="From each rotation on; 90 if left out" optional type="number" min="1" max="3650" step="1" value=${form.ttlDays} onInput=${set('ttlDays')} error=${fields.ttlDays} />
        </div>
        ${several ? html`<${Several} of=${several} made=${made} onMade=${setMade} onRemove=${s => several.length > 2 ? setSeveral(several.filter(o => o !== s)) : take(several.filter(o => o !== s))} />` : html`
          <fieldset><legend>Values</legend><${Rows} rows=${rows} onChange=${change} errors=${errors.values} />
            ${kept.length > 0 && html`<${Kept} values=${kept} onRemove=${key => setKept(kept.filter(([k]) => k !== key))} />`}</fieldset>
          ${taken && html`<${Taken} of=${taken} made=${made} onMade=${setMade} />`}`}
      <//>
    </div><//>
    ${manifest && html`<${Panel} title="The manifest" actions=${html`<${Copy} text=${manifest.text} label="Copy the manifest" /><button type="button" onClick=${() => save(manifest.name + '.yaml', manifest.text, 'application/yaml')}>Download</button>`}>
      <p tabindex="-1" ref=${result} role="status">Sealed. No plaintext left this page: nothing was sent to the server. Apply the manifest with <code>kubectl apply -f ${manifest.name}.yaml</code>, or keep it in git.</p>
      <div class="row">${manifest.forgotten ? html`<p class="quiet">The values are no longer on this page.</p>`
        : html`<p>The values are still in the form above, in the memory of this page alone.</p><button type="button" onClick=${forget}>Forget the values</button>`}</div>
      <pre tabindex="0" class="tall" aria-label="The manifest">${manifest.text}</pre>
    <//>`}`;
}
