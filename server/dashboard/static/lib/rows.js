// An editor of secret values by key, for what is sealed on the server and in the page.
import {html, useEffect, useId, useRef, useState} from '../vendor/preact.js';
import {count} from './format.js';

let made = 0;

// newRow makes {id, key, value}: the id stays the same whatever is entered.
export const newRow = (key = '', value = '') => ({id: 'row' + ++made, key, value});

const blank = row => row.key === '' && row.value === '';
const filled = rows => rows.filter(row => !blank(row));
const encoder = new TextEncoder();

const most = 64, mostBytes = 256 * 1024;

// checkRows says what is wrong, by the id of the row; what is wrong with all of them
// together is under ''. Nothing is wrong when the object is empty. Rows in which nothing
// was entered do not count.
export function checkRows(rows) {
  const errors = {}, given = filled(rows), seen = new Set();
  if (given.length === 0) errors[rows[0]?.id ?? ''] = 'Enter at least one value.';
  if (given.length > most) errors[''] = `There can be at most ${most} values; these are ${given.length}.`;
  let bytes = 0;
  for (const {id, key, value} of given) {
    if (key === '') errors[id] = 'Give this value a key.';
    else if (!/^[-._A-Za-z0-9]{1,253}$/.test(key)) errors[id] = 'A key has letters from A to Z, digits, and the signs - . _ only, and at most 253 of them.';
    else if (seen.has(key)) errors[id] = 'Another value has this key already.';
    seen.add(key);
    bytes += key.length + encoder.encode(value).length;
  }
  if (bytes > mostBytes) errors[''] = `Keys and values together have ${count(bytes, 'byte')}; at most ${count(mostBytes, 'byte')} (256 KiB) fit.`;
  return errors;
}

// fromRows is the object of the values by key.
export const fromRows = rows => Object.fromEntries(filled(rows).map(({key, value}) => [key, value]));

const escapes = {n: '\n', r: '\r', t: '\t'};
const line = /^[ \t]*(?:export[ \t]+)?([-._A-Za-z0-9]+)[ \t]*=[ \t]*(?:"((?:[^"\\]|\\[^])*)"|'([^']*)'|(.*?))[ \t]*$/gm;

// readLines reads KEY=VALUE lines as .env files have them: {rows, left}, left being how
// many lines are something else. Text in quotes may have line breaks; # begins a comment
// only at the beginning of a line, since it is common in passwords.
export function readLines(text) {
  const rows = [];
  const rest = text.replaceAll('\r\n', '\n').replace(/^[ \t]*#.*$/gm, '').replace(line, (_, key, double, single, plain) => {
    const value = double?.replace(/\\([nrt"\\])/g, (_, c) => escapes[c] ?? c) ?? single ?? plain;
    rows.push(newRow(key, value));
    return '';
  });
  return {rows, left: rest.split('\n').filter(l => l.trim() !== '').length};
}

const name = /^[A-Za-z_][A-Za-z0-9_]*$/, bare = /^[-+._:/,@%a-zA-Z0-9]+$/;

// asEnv returns values as lines of a .env file that all readers and shells take alike, by the rules of
// `latticekeep get -o env`: no character of a value may run or stand for something else. It throws for what such a file
// cannot hold.
export function asEnv(values) {
  return Object.entries(values).map(([key, value]) => {
    const quoted = value.includes("'") ? '"' : "'";
    if (!name.test(key) || value.includes('\0') || value.includes("'") && /[\\"$`]/.test(value) || value.endsWith('\\') || value.includes('\\\\')) {
      throw new Error(`A .env file cannot hold ${key} so that all programs read it alike. Copy as JSON instead.`);
    }
    return `${key}=${bare.test(value) ? value : quoted + value + quoted}\n`;
  }).join('');
}

// A value is hidden by a font of dots and not by a password field, which would lose
// the line breaks of a key or a certificate that is pasted.
function Value({id, value, number, onInput, described}) {
  const [shown, setShown] = useState(false);
  const lines = value.split('\n').length;
  return html`<div class="field">
    <label for=${id}>Value</label>
    <div class="joined">
      <textarea id=${id} class=${'line' + (shown ? '' : ' concealed')} rows=${Math.min(lines, 8)} spellcheck=${false} autocomplete="off" autocapitalize="none" dir="auto"
        aria-describedby=${described} value=${value} onInput=${e => onInput(e.target.value)}></textarea>
      <button type="button" aria-label=${`${shown ? 'Hide' : 'Show'} value ${number}`} onClick=${() => setShown(!shown)}>${shown ? 'Hide' : 'Show'}</button>
    </div>
    ${!shown && lines > 1 && html`<p class="hint">${count(lines, 'line')}</p>`}
  </div>`;
}

function Paste({take, close}) {
  const [text, setText] = useState('');
  const [left, setLeft] = useState(0);
  const id = useId(), field = useRef();
  useEffect(() => field.current.focus(), []);
  const use = () => {
    const read = readLines(text);
    if (read.left > 0 || read.rows.length === 0) return setLeft(read.left || 1);
    take(read.rows);
  };
  return html`<div class="field">
    <label for=${id}>Lines such as KEY=VALUE, as in .env files</label>
    <textarea id=${id} ref=${field} class="concealed" spellcheck=${false} autocomplete="off" autocapitalize="none" value=${text} aria-invalid=${left > 0 ? 'true' : undefined}
      aria-describedby=${id + '-error'} onInput=${e => { setText(e.target.value); setLeft(0); }}></textarea>
    <p class="wrong" id=${id + '-error'} aria-live="polite">${left > 0 && (text.trim() === '' ? 'There is nothing in it yet.' : `${count(left, 'line')} cannot be read as KEY=VALUE. Nothing was added.`)}</p>
    <div class="actions"><button type="button" onClick=${use}>Add these values</button><button type="button" onClick=${close}>Cancel</button></div>
  </div>`;
}

// Rows edits rows, a list of {id, key, value}; onChange gets the new list. errors are
// those of checkRows.
export function Rows({rows, onChange, errors = {}}) {
  const [pasting, setPasting] = useState(false);
  const focus = useRef(null), box = useRef();
  const base = useId();
  useEffect(() => { // after a row has come or gone, the focus is where one goes on
    if (focus.current === null) return;
    box.current.querySelector(focus.current)?.focus();
    focus.current = null;
  });
  const at = i => `${base}-${rows[i].id}`;
  const change = (i, field) => onChange(rows.map((row, n) => n === i ? {...row, ...field} : row));
  const add = () => {
    const row = newRow();
    focus.current = `#${CSS.escape(`${base}-${row.id}-key`)}`;
    onChange([...rows, row]);
  };
  const remove = i => {
    const near = rows[i + 1] ?? rows[i - 1];
    focus.current = near ? `#${CSS.escape(`${base}-${near.id}-key`)}` : '[data-add]';
    onChange(rows.filter((_, n) => n !== i));
  };
  // Lines take the place of the row i if there is nothing in it, and of all rows of the same key.
  const take = more => {
    const keys = new Set(more.map(row => row.key));
    focus.current = '[data-add]';
    setPasting(false);
    onChange([...filled(rows).filter(row => !keys.has(row.key)), ...new Map(more.map(row => [row.key, row])).values()]);
  };
  const paste = e => {
    const text = e.clipboardData?.getData('text') ?? '';
    if (!/[=\n]/.test(text.trim())) return;
    const read = readLines(text);
    if (read.left > 0 || read.rows.length === 0) return;
    e.preventDefault();
    take(read.rows);
  };
  return html`<div class="stack rows" ref=${box}>
    ${rows.map((row, i) => html`<div class="pair" key=${row.id} role="group" aria-label=${`Value ${i + 1}`}>
      <div class="field"><label for=${at(i) + '-key'}>Key</label>
        <input id=${at(i) + '-key'} class="mono" spellcheck=${false} autocomplete="off" autocapitalize="none" maxlength="253" value=${row.key} onPaste=${paste}
          aria-invalid=${errors[row.id] ? 'true' : undefined} aria-describedby=${errors[row.id] ? at(i) + '-error' : undefined} onInput=${e => change(i, {key: e.target.value})} /></div>
      <${Value} id=${at(i) + '-value'} value=${row.value} number=${i + 1} described=${errors[row.id] ? at(i) + '-error' : undefined} onInput=${value => change(i, {value})} />
      <button type="button" class="take" aria-label=${`Remove value ${i + 1}`} onClick=${() => remove(i)}>Remove</button>
      ${errors[row.id] && html`<p class="wrong" id=${at(i) + '-error'}>${errors[row.id]}</p>`}
    </div>`)}
    ${errors[''] && html`<p class="wrong" role="alert">${errors['']}</p>`}
    ${pasting ? html`<${Paste} take=${take} close=${() => { focus.current = '[data-add]'; setPasting(false); }} />` : html`<div class="actions">
      <button type="button" data-add onClick=${add}>Add a value</button>
      <button type="button" onClick=${() => setPasting(true)}>Paste KEY=VALUE lines</button>
    </div>`}
  </div>`;
}
