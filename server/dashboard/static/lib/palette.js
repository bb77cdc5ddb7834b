// The command palette: pages, actions, what the page offers and credentials by their names, by the keyboard alone.
import {html, useEffect, useId, useRef, useState} from '../vendor/preact.js';
import {useAccount} from './account.js';
import {get} from './api.js';
import {chooseTheme, themes} from './theme.js';
import {Dialog, Name, navigate} from './ui.js';

// Where one can go, and what can be done: text, address or function, scope, and words that find it too. What changes
// something is left out once the plan allows no changes.
const pages = [
  ['Overview', '/'], ['Vault', '/vault', 'vault:read', 'credentials secrets'], ['Encrypt and sign', '/crypto', '', 'decrypt verify'], ['Keys', '/keys', 'keys:read', 'named keys'],
  ['Compliance', '/compliance', 'compliance:read', 'scores reports'], ['Audit log', '/audit', 'audit:read', 'entries'], ['Cluster', '/cluster', 'vault:read', 'kubernetes'],
  ['API keys', '/settings/api-keys', 'account:admin', 'settings'], ['Members', '/settings/members', 'account:admin', 'settings users'],
  ['Policies', '/settings/policies', 'account:admin', 'settings access paths'], ['Groups', '/settings/groups', 'account:admin', 'settings access'],
  ['Webhooks', '/settings/webhooks', 'account:admin', 'settings events'], ['Rules', '/settings/rules', 'account:admin', 'settings history names'],
  ['Profile', '/settings/profile', '', 'settings account'], ['Sessions', '/settings/sessions', '', 'settings'], ['Plan', '/settings/plan', '', 'settings trial'],
];
const actions = [
  ['New credential', '/vault/new', 'vault:write', 'create secret seal', true],
  ['Create an API key', '/settings/api-keys?do=create', 'account:admin', 'new token', true],
  ['Invite member', '/settings/members?do=invite', 'account:admin', 'new user', true],
  ['Create a named key', '/keys?do=create', 'keys:write', 'new', true],
  ['Create a policy', '/settings/policies?do=create', 'account:admin', 'new access path', true],
  ['Bind policies', '/settings/policies?do=bind', 'account:admin', 'access user', true],
  ['Create a group', '/settings/groups?do=create', 'account:admin', 'new team', true],
  ['Create a webhook', '/settings/webhooks?do=create', 'account:admin', 'new event', true],
  ['Create a rule of the history', '/settings/rules?do=create', 'account:admin', 'new versions keep', true],
  ['Seal in the browser', '/cluster/seal', 'vault:read', 'manifest kubernetes SealedCredential'],
  ['Encrypt data', '/crypto', 'crypto:encrypt'], ['Decrypt data', '/crypto?do=decrypt', 'crypto:decrypt'],
  ['Sign data', '/crypto?do=sign', 'crypto:sign'], ['Verify a signature', '/crypto?do=verify', 'crypto:verify'],
  ['Make a report', '/compliance/report', 'compliance:read', 'pdf oscal ksi'],
  ['Denied attempts', '/audit?show=denied', 'audit:read', 'denials'], ['Export entries', '/audit?do=export', 'audit:read', 'csv ndjson log download'],
  ['Record a review', '/audit?do=review', 'audit:read', 'acknowledge denials log'],
  ['Change your password', '/settings/password'],
  ...Object.entries(themes).map(([theme, [, text]]) => [text, () => chooseTheme(theme), '', 'theme mode']),
];

// offered returns what the page offers to whoever is on it, such as Rename: the buttons that say so. One that may not
// be pressed is not there, or is disabled.
const offered = () => [...document.querySelectorAll('main [data-offered]:not(:disabled, td *)')].map(button => [button.ariaLabel ?? button.innerText, () => {
  button.focus(); // which has the focus again when its dialog closes
  button.click();
}]);

const shortest = 2; // characters before credentials are looked for
const pause = 250; // milliseconds after the last key

// matching returns the entries that have every word of a text.
function matching(entries, kind, text, account) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return entries.filter(([name, , scope, more = '', changes]) => (!scope || account.can(scope)) && (!changes || account.writes) && words.every(w => `${name} ${more}`.toLowerCase().includes(w)))
    .map(([name, to]) => ({key: kind + name, name, to, kind}));
}

// useCredentials looks for credentials by a part of their names: each look is an entry in the audit log, so it waits
// for a pause.
function useCredentials(text, may) {
  const [state, setState] = useState({of: '', list: []});
  useEffect(() => {
    if (!may || text.length < shortest) return setState({of: '', list: []});
    const abort = new AbortController();
    const timer = setTimeout(() => {
      get('/api/v2/vault/list', {q: text, limit: 8}, abort.signal).then(
        ({credentials}) => { if (!abort.signal.aborted) setState({of: text, list: credentials}); },
        () => { if (!abort.signal.aborted) setState({of: text, list: [], failed: true}); });
    }, pause);
    return () => { clearTimeout(timer); abort.abort(); };
  }, [text, may]);
  return {...state, looking: may && text.length >= shortest && state.of !== text};
}

export function Palette({signOut, onClose}) {
  const account = useAccount();
  const [typed, setTyped] = useState('');
  const [at, setAt] = useState(0);
  const [here] = useState(offered);
  const id = useId(), list = useRef();
  const text = typed.trim();
  const credentials = useCredentials(text, account.can('vault:read'));
  const begins = option => option.name.toLowerCase().startsWith(text.toLowerCase());
  const options = [
    ...matching(here, 'On this page', text, account), ...matching([...actions, ['Sign out', signOut, '', 'log out leave']], 'Action', text, account), ...matching(pages, 'Page', text, account),
    ...credentials.list.map(c => ({key: c.credential_id, name: c.name, to: '/vault/' + c.credential_id, kind: 'Credential'})),
  ].sort((a, b) => begins(b) - begins(a)); // what begins with the text is meant rather than what has it somewhere
  const chosen = Math.min(at, options.length - 1);
  useEffect(() => { list.current?.querySelector('[aria-selected=true]')?.scrollIntoView({block: 'nearest'}); }, [chosen, options.length]);
  const go = option => {
    if (!option) return;
    onClose();
    if (typeof option.to === 'string') navigate(option.to);
    else setTimeout(option.to); // once this dialog has closed
  };
  const keys = e => {
    const to = {ArrowDown: chosen + 1, ArrowUp: chosen - 1, Home: 0, End: options.length - 1}[e.key];
    if (!e.isComposing && to !== undefined && options.length > 0 && !((e.key === 'Home' || e.key === 'End') && e.shiftKey)) {
      e.preventDefault();
      setAt((to + options.length) % options.length);
    }
  };
  const said = credentials.looking ? 'Looking for credentials' : credentials.failed ? 'Credentials could not be looked for' : options.length === 0 ? 'Nothing found' : `${options.length} found`;
  return html`<${Dialog} title="Search" onClose=${onClose}>
    <form class="palette" onSubmit=${e => { e.preventDefault(); go(options[chosen]); }}>
      <input type="text" role="combobox" aria-label="Page, action or credential" aria-expanded="true" aria-autocomplete="list" aria-controls=${id} aria-activedescendant=${options.length > 0 ? id + '-' + chosen : undefined}
        dir="auto" spellcheck=${false} autocomplete="off" maxlength="255" placeholder="Page, action or credential" autofocus value=${typed} onInput=${e => { setTyped(e.target.value); setAt(0); }} onKeyDown=${keys} />
      <ul id=${id} role="listbox" aria-label="Found" ref=${list}>${options.map((o, i) => html`
        <li key=${o.key} id=${id + '-' + i} role="option" aria-selected=${i === chosen} onMouseDown=${e => e.preventDefault()} onClick=${() => go(o)}>
          <${Name}>${o.name}<//><span class="quiet"><span class="unseen">, </span>${o.kind}</span></li>`)}</ul>
      <p class="quiet" role="status">${said}</p>
    </form>
  <//>`;
}
