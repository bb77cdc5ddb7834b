// The parts that pages are made of. Each says by its markup what it is, works with
// the keyboard alone, and shows text as text.
import {html, useCallback, useEffect, useId, useLayoutEffect, useRef, useState} from '../vendor/preact.js';
import {ago, briefTime, localTime, short, utc, visible} from './format.js';
import {Icon} from './icons.js';
import {remedies} from './words.js';
import {Link, navigate, useHere, setQuery} from './router.js';

// ---- the page

// Page is the content beside the navigation. Its heading takes the focus when the
// page comes, so that a screen reader begins there.
export function Page({title, name, lead, actions, back, children}) {
  const heading = useRef();
  const {path} = useHere();
  useEffect(() => {
    document.title = `${visible(title)} · Latticekeep`;
  }, [title]);
  useEffect(() => {
    if (document.activeElement === document.body || !document.activeElement?.closest('main, dialog')) heading.current?.focus({preventScroll: true});
  }, [path]);
  return html`
    <header class="page-head">
      <div>
        ${back && html`<p class="back"><${Link} to=${back.to}>← ${back.text}<//></p>`}
        <h1 tabindex="-1" ref=${heading}>${name ? html`<${Name}>${name}<//>` : title}</h1>
        ${lead && html`<p class="lead">${lead}</p>`}
      </div>
      ${actions && html`<div class="actions">${actions}</div>`}
    </header>
    ${children}`;
}

// Panel is a titled part of a page.
export function Panel({title, actions, children, ...more}) {
  const id = useId();
  return html`<section class="panel" aria-labelledby=${id} ...${more}>
    <header><h2 id=${id}>${title}</h2>${actions && html`<div class="actions">${actions}</div>`}</header>
    ${children}
  </section>`;
}

// Facts is a list of what is known of a thing: pairs of a word and what it is; pairs
// without a second are left out.
export const Facts = ({of}) => html`<dl class="facts">${of.filter(([, v]) => v !== undefined && v !== null && v !== false && v !== '').map(([word, v]) => html`
  <div key=${word}><dt>${word}</dt><dd>${v}</dd></div>`)}</dl>`;

// ---- text

// Name is something that a user wrote: isolated, so that its direction changes
// nothing around it, and with what is invisible made visible.
export const Name = ({children}) => html`<bdi>${visible(children ?? '')}</bdi>`;

// Address is a Name that breaks behind its @ first. It is not for links: a screen reader has the break in what they are called.
export const Address = ({children}) => html`<bdi>${visible(children ?? '').split(/(?<=@)/).map((part, i) => html`${i > 0 && html`<wbr />`}${part}`)}</bdi>`;

// Time is a moment in the viewer's zone, or how long it is away, with UTC on hover. A short one has no year.
export const Time = ({at, relative = false, short = false}) => at
  ? html`<time datetime=${at} title=${relative || short ? `${localTime(at)}, ${utc(at)}` : utc(at)}>${relative ? ago(at) : short ? briefTime(at) : localTime(at)}</time>`
  : html`<span class="quiet">never</span>`;

// LastRead is when a secret was read last, which is known by the hour: at is when that hour began.
export const LastRead = ({at}) => at && Date.now() - new Date(at) < 3600e3 ? html`<time datetime=${at} title=${utc(at)}>within an hour</time>` : html`<${Time} at=${at} relative />`;

// Hash is a hash or an id, shortened, with the whole on hover and to copy.
export const Hash = ({children, whole = false, label = 'Copy'}) => html`<span class="hash"><code title=${children}>${whole ? children : short(children)}</code><${Copy} text=${children} label=${label} small /></span>`;

// Tag says a state: by a sign and a word, and by colour beside them. kind is good,
// warn, bad or plain.
const signs = {good: '✓', warn: '!', bad: '✕', plain: '•'};
export const Tag = ({kind = 'plain', children}) => html`<span class=${'tag ' + kind}><span aria-hidden="true">${signs[kind]}</span> ${children}</span>`;

// ---- what happens meanwhile

const heard = new EventTarget();

// say shows a short message for some seconds, and has it read out.
export function say(message, kind = 'good') {
  heard.dispatchEvent(new CustomEvent('say', {detail: {message, kind, id: Math.random()}}));
}

// Messages is where say is seen; the shell has it once.
export function Messages() {
  const [shown, setShown] = useState([]);
  useEffect(() => {
    const add = ({detail}) => {
      setShown(list => [...list.slice(-2), detail]);
      setTimeout(() => setShown(list => list.filter(m => m !== detail)), 6000);
    };
    heard.addEventListener('say', add);
    return () => heard.removeEventListener('say', add);
  }, []);
  return html`<div class="messages" role="status" aria-live="polite">${shown.map(m => html`
    <p key=${m.id} class=${m.kind}>${m.message}</p>`)}</div>`;
}

// What the server says of these names the field and the rule, which is truer than what the status says alone.
const named = new Set([400, 409, 412, 422]);

const sentence = text => visible(text).replace(/^./, c => c.toUpperCase()).replace(/[^.!?]$/, '$&.');

// Trouble shows a failure: what went wrong and what to do, in one sentence that is read out, the rest behind
// "Show details" and, when it may be repeated, a button that counts down if it has to wait. texts has another
// remedy for a status, or a pair of title and remedy, which is all that is shown.
export function Trouble({error, retry, texts = {}}) {
  const [, tick] = useState(0);
  const wait = Math.max(0, Math.ceil(((error.retryAt ?? 0) - Date.now()) / 1000));
  useEffect(() => {
    if (wait === 0) return;
    const timer = setTimeout(() => tick(n => n + 1), 500);
    return () => clearTimeout(timer);
  });
  const known = error.status === undefined ? ['This did not work', error.message] : remedies[error.status] ?? remedies[500];
  const text = texts[error.status], whole = Array.isArray(text);
  const own = text === undefined && named.has(error.status) && error.message !== '';
  const [title, remedy] = whole ? text : [known[0], text ?? (own ? sentence(error.message) : known[1])];
  const message = error.status !== undefined && !own && error.message;
  return html`<div class="trouble">
    <p role="alert"><strong>${title}.</strong> ${remedy}</p>
    ${!whole && (message || error.requestID) && html`<details><summary>Show details</summary><${Facts} of=${[
      ['Server message', message && visible(message)],
      ['Status', error.status],
      ['Request id', error.requestID && html`<${Hash} whole label="Copy the request id">${error.requestID}<//>`],
    ]} /></details>`}
    ${(retry || wait > 0) && html`<p><button type="button" disabled=${wait > 0} onClick=${retry}>${wait > 0 ? `Try again in ${wait} s` : 'Try again'}</button></p>`}
  </div>`;
}

// useLoad runs load(signal) when the page comes and when deps change, and gives
// {data, error, loading, reload, set}. What was there stays while it loads anew, and is
// never painted as if it were what is asked for now.
export function useLoad(load, deps) {
  const [state, setState] = useState({loading: true});
  const [turn, setTurn] = useState(0);
  useLayoutEffect(() => {
    const abort = new AbortController();
    setState(s => ({...s, error: undefined, loading: true}));
    load(abort.signal).then(
      data => { if (!abort.signal.aborted) setState({data, loading: false}); },
      error => { if (!abort.signal.aborted) setState(s => ({...s, error, loading: false})); });
    return () => abort.abort();
  }, [...deps, turn]);
  const reload = useCallback(() => setTurn(n => n + 1), []);
  const set = useCallback(data => setState(s => ({...s, data})), []);
  return {...state, reload, set};
}

// Skeleton stands for what is on its way.
export const Skeleton = ({lines = 3}) => html`<div class="skeleton" role="status" aria-label="Loading">${Array.from({length: lines}, (_, i) => html`<span key=${i}></span>`)}</div>`;

// Loaded shows what a useLoad has: children(data), or that it is on its way, or what
// went wrong, of which texts says more by the status. When new data takes away what had
// the focus, such as the row of something that was deleted, the focus stays beside it.
export function Loaded({of, children, texts, lines = 3}) {
  const box = useRef();
  const had = box.current?.contains(document.activeElement);
  useEffect(() => {
    if (had && document.activeElement === document.body) (box.current?.querySelector('.table') ?? box.current)?.focus({preventScroll: true});
  });
  if (of.error && of.data === undefined) return html`<${Trouble} error=${of.error} retry=${of.reload} texts=${texts} />`;
  if (of.data === undefined) return html`<${Skeleton} lines=${lines} />`;
  return html`${of.error && html`<${Trouble} error=${of.error} retry=${of.reload} texts=${texts} />`}<div ref=${box} tabindex="-1" aria-busy=${of.loading}>${children(of.data)}</div>`;
}

export const Empty = ({title, children}) => html`<div class="empty"><p><strong>${title}</strong></p>${children}</div>`;

// ---- what is entered

// Field is a label, a control, a hint and what is wrong with it. children is a
// function of the attributes that tie them together.
export function Field({label, hint, error, optional, children}) {
  const id = useId();
  const described = [hint && id + '-hint', error && id + '-error'].filter(Boolean).join(' ') || undefined;
  return html`<div class="field">
    <label for=${id}>${label}${optional && html` <span class="quiet">(optional)</span>`}</label>
    ${children({id, 'aria-describedby': described, 'aria-invalid': error ? 'true' : undefined})}
    ${hint && html`<p class="hint" id=${id + '-hint'}>${hint}</p>`}
    ${error && html`<p class="wrong" id=${id + '-error'}>${error}</p>`}
  </div>`;
}

// Input is a Field of one line. onInput gets the text.
export function Input({label, hint, error, optional, value, onInput, ...more}) {
  return html`<${Field} ...${{label, hint, error, optional}}>${tied => html`
    <input dir="auto" spellcheck=${false} autocomplete="off" required=${!optional} value=${value} onInput=${e => onInput(e.target.value)} ...${more} ...${tied} />`}<//>`;
}

// Choice is a Field with a list to choose from: options are pairs of value and text.
export function Choice({label, hint, error, optional, value, onInput, options, ...more}) {
  return html`<${Field} ...${{label, hint, error, optional}}>${tied => html`
    <select value=${value} onChange=${e => onInput(e.target.value)} ...${more} ...${tied}>${options.map(([v, text]) => html`
      <option key=${v} value=${v} selected=${v === value}>${text}</option>`)}</select>`}<//>`;
}

// Password is a Field whose text can be shown.
export function Password({label, hint, error, value, onInput, ...more}) {
  const [shown, setShown] = useState(false);
  return html`<${Field} ...${{label, hint, error}}>${tied => html`<div class="joined">
    <input type=${shown ? 'text' : 'password'} spellcheck=${false} autocapitalize="none" required value=${value} onInput=${e => onInput(e.target.value)} ...${more} ...${tied} />
    <button type="button" aria-pressed=${shown} onClick=${() => setShown(!shown)}>${shown ? 'Hide' : 'Show'}</button>
  </div>`}<//>`;
}

// Form sends once at a time. When that fails it says so, and everything stays as it
// was entered. submit is the text of its button, which keeps the focus meanwhile, as one
// that is disabled would not.
export function Form({onSubmit, submit, kind = 'primary', cancel, texts, children, ...more}) {
  const [state, setState] = useState({});
  const alive = useRef(true);
  useEffect(() => () => { alive.current = false; }, []);
  const send = async e => {
    e.preventDefault();
    if (state.busy) return;
    setState({busy: true});
    try {
      await onSubmit();
      if (alive.current) setState({});
    } catch (error) {
      if (alive.current) setState(error.name === 'AbortError' ? {} : {error});
    }
  };
  return html`<form onSubmit=${send} aria-busy=${!!state.busy} ...${more}>
    ${children}
    ${state.error && html`<${Trouble} error=${state.error} texts=${texts} />`}
    <div class="actions">
      <button type="submit" class=${kind} aria-disabled=${!!state.busy}>${state.busy ? 'Working…' : submit}</button>
      ${cancel && html`<button type="button" onClick=${cancel}>Cancel</button>`}
    </div>
  </form>`;
}

// Act is a button for something that takes a moment: once at a time, and what goes
// wrong is said beside it.
export function Act({onClick, children, kind = '', done, texts, ...more}) {
  const [state, setState] = useState({});
  const run = async () => {
    if (state.busy) return;
    setState({busy: true});
    try {
      await onClick();
      setState({});
      if (done) say(done);
    } catch (error) {
      setState(error.name === 'AbortError' ? {} : {error});
    }
  };
  return html`<button type="button" class=${kind} aria-busy=${!!state.busy} onClick=${run} ...${more}>${children}</button>
    ${state.error && html`<${Trouble} error=${state.error} retry=${run} texts=${texts} />`}`;
}

// toClipboard puts text on the clipboard, or says why it cannot.
export async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    throw new Error('The browser did not allow copying. Select the text and copy it yourself.');
  }
}

// Copy puts text on the clipboard; text may be a function that fetches it, so that a
// value can be copied without being shown.
export function Copy({text, label = 'Copy', small = false, done = 'Copied'}) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    try {
      await toClipboard(typeof text === 'function' ? await text() : text);
      setCopied(true);
      say(done);
      setTimeout(() => setCopied(false), 2000);
    } catch (error) {
      if (error.status !== undefined) say('Not copied: ' + (remedies[error.status] ?? remedies[500])[1], 'bad');
      else say(error.message, 'bad');
    }
  };
  return html`<button type="button" class=${small ? 'small' : ''} onClick=${copy} title=${small ? label : undefined} aria-label=${small ? label : undefined}>${
    small ? html`<${Icon} name=${copied ? 'Check' : 'Copy'} />` : copied ? '✓ Copied' : label}</button>`;
}

// save offers a text or bytes as a file.
export function save(name, content, type = 'text/plain') {
  const url = URL.createObjectURL(new Blob([content], {type}));
  const a = document.createElement('a');
  a.href = url;
  a.download = name;
  a.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

// ---- dialogs

// Dialog is modal: Escape closes it, the focus stays inside and goes back to where
// it was. fixed ones are closed by what is in them alone.
export function Dialog({title, onClose, fixed = false, children}) {
  const box = useRef(), id = useId();
  useLayoutEffect(() => {
    const dialog = box.current;
    dialog.showModal();
    return () => dialog.close();
  }, []);
  const cancel = e => {
    e.preventDefault();
    if (!fixed) onClose();
  };
  return html`<dialog ref=${box} aria-labelledby=${id} onCancel=${cancel}>
    <header><h2 id=${id}>${title}</h2>${!fixed && html`<button type="button" class="small" aria-label="Close" onClick=${onClose}><span aria-hidden="true">✕</span></button>`}</header>
    ${children}
  </dialog>`;
}

// useAsked is the state of dialogs which the address may ask for, by ?do=NAME, as the command palette does. dialogs has
// the state for each name, or nothing for one that is not allowed. The address is rid of it, so that the way back does
// not ask again.
export function useAsked(dialogs) {
  const {query} = useHere();
  const [state, setState] = useState(null);
  const name = query.get('do') ?? '';
  useEffect(() => {
    if (!Object.hasOwn(dialogs, name)) return;
    setState(dialogs[name] || null);
    setQuery({do: ''}, {replace: true});
  }, [name]);
  return [state, setState];
}

// What a name looks like: how it is spelled inside does not show, and spaces run together.
const look = name => visible(name).normalize().replace(/\s+/g, ' ').trim();

// Confirm asks before something that cannot be undone. typed, when given, is a name
// that has to be entered first, as it is shown.
export function Confirm({title, action, typed, onConfirm, onClose, texts, children}) {
  const [text, setText] = useState('');
  const [wrong, setWrong] = useState('');
  const confirm = async () => {
    if (typed !== undefined && look(text) !== look(typed)) {
      setWrong('This is not the name. Enter it exactly as it is shown above.');
      return;
    }
    await onConfirm();
    onClose();
  };
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <${Form} onSubmit=${confirm} submit=${action} kind="danger" cancel=${onClose} texts=${texts}>
      ${children}
      ${typed !== undefined && html`<p>Its name is <strong><${Name}>${typed}<//></strong></p>
        <${Input} label="Enter the name to confirm" value=${text} error=${wrong} onInput=${t => { setText(t); setWrong(''); }} autofocus />`}
    <//>
  <//>`;
}

// ---- tables

// Table has columns [{title, cell(row), class}] and rows with a key. On narrow screens each row becomes a card
// whose cells carry their column's title. A column with a sort has a button in its heading: sort is the one that
// the rows are in, and onSort gets the one that is wanted. descending says which way a column goes. A dense table has one line for each row.
export function Table({caption, columns, rows, rowKey, rowClass, sort, onSort, dense = false}) {
  const heading = c => c.hidden ? html`<span class="unseen">${c.title}</span>`
    : c.sort === undefined || !onSort ? c.title
    : html`<button type="button" class="sort" onClick=${() => onSort(c.sort)}>${c.title} <span aria-hidden="true">${c.sort === sort ? c.descending ? '↓' : '↑' : ''}</span></button>`;
  const order = c => c.sort !== undefined && c.sort === sort ? c.descending ? 'descending' : 'ascending' : undefined;
  return html`<div class=${'table' + (dense ? ' dense' : '')} role="region" aria-label=${caption} tabindex="0"><table>
    <caption class="unseen">${caption}</caption>
    <thead><tr>${columns.map(c => html`<th key=${c.title} scope="col" class=${c.class ?? ''} aria-sort=${order(c)}>${heading(c)}</th>`)}</tr></thead>
    <tbody>${rows.map(row => html`<tr key=${row[rowKey]} class=${rowClass?.(row) ?? ''}>${columns.map(c => html`
      <td key=${c.title} data-title=${c.hidden ? '' : c.title} class=${c.class ?? ''}>${c.cell(row)}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

// Pages leads through a list that has cursors. The cursor is in the address, so that
// the back button is the way back. With another page the focus goes to where it begins.
export function Pages({next, shown}) {
  const {query} = useHere();
  const cursor = query.get('cursor');
  const turn = to => e => {
    e.currentTarget.closest('[aria-busy]')?.querySelector('.table')?.focus({preventScroll: true});
    setQuery({cursor: to});
    scrollTo(0, 0);
  };
  return html`<nav class="pages" aria-label="Pages">
    <span class="quiet">${shown}${next ? ' on this page, more follow' : cursor ? ' on the last page' : ''}</span>
    <span class="actions">
      ${cursor && html`<button type="button" onClick=${turn('')}>First page</button>`}
      ${next && html`<button type="button" onClick=${turn(next)}>Next page</button>`}
    </span>
  </nav>`;
}

// Search is a text filter in the address field `name`; what is typed is applied
// shortly after the last key.
export function Search({label, name = 'q', placeholder, ...more}) {
  const {query} = useHere();
  const [text, setText] = useState(query.get(name) ?? '');
  const timer = useRef();
  useEffect(() => { setText(query.get(name) ?? ''); }, [query.get(name)]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const type = value => {
    setText(value);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => setQuery({[name]: value, cursor: ''}, {replace: true}), 250);
  };
  return html`<${Field} label=${label}>${tied => html`<input type="search" dir="auto" spellcheck=${false} autocomplete="off" placeholder=${placeholder} value=${text} onInput=${e => type(e.target.value)} ...${more} ...${tied} />`}<//>`;
}

// Filter is a choice in the address field `name`.
export function Filter({label, name, options}) {
  const {query} = useHere();
  return html`<${Choice} label=${label} optional=${false} value=${query.get(name) ?? ''} options=${options} onInput=${value => setQuery({[name]: value, cursor: ''})} />`;
}

// ---- pictures

// Gauge is a share of 100 as an arc and a number; null is "withheld". One that is no judgement is neutral.
export function Gauge({value, label, unit = 'of 100', neutral = false}) {
  const arc = Math.PI * 40, known = value !== null && value !== undefined;
  const text = known ? `${Math.round(value * 10) / 10} ${unit}` : 'withheld';
  return html`<figure class="gauge"><svg viewBox="0 0 100 58" role="img" aria-label=${`${label}: ${text}`}>
    <path class="track" d="M10 50a40 40 0 0 1 80 0" />
    ${known && html`<path class=${neutral ? 'neutral' : value >= 80 ? 'good' : value >= 50 ? 'warn' : 'bad'} d="M10 50a40 40 0 0 1 80 0" stroke-dasharray=${`${arc * value / 100} ${arc}`} />`}
    <text x="50" y="44">${known ? Math.round(value * 10) / 10 : '–'}</text><text class="unit" x="50" y="56">${known ? unit : 'withheld'}</text>
  </svg></figure>`;
}

export {Link, navigate, useHere, setQuery};
