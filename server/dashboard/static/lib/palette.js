// The command palette: pages, actions and credentials by their names, by the keyboard alone.
import {html, useEffect, useId, useRef, useState} from '../vendor/preact.js';
import {useAccount} from './account.js';
import {get} from './api.js';
import {Dialog, Name, navigate} from './ui.js';

// Where one can go, and what can be done there: text, address, scope, and words that find it too. What changes
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
  ['Create an API key', '/settings/api-keys', 'account:admin', 'new token', true],
  ['Invite member', '/settings/members', 'account:admin', 'new user', true],
  ['New named key', '/keys', 'keys:write', 'create', true],
  ['Seal in the browser', '/cluster/seal', '', 'manifest kubernetes SealedCredential'],
  ['Encrypt data', '/crypto', 'crypto:encrypt'], ['Decrypt data', '/crypto?do=decrypt', 'crypto:decrypt'],
  ['Sign data', '/crypto?do=sign', 'crypto:sign'], ['Verify a signature', '/crypto?do=verify', 'crypto:verify'],
  ['Make a report', '/compliance/report', 'compliance:read', 'pdf oscal ksi'],
  ['Denied attempts', '/audit?show=denied', 'audit:read', 'denials'], ['Change your password', '/settings/password'],
];

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

export function Palette({onClose}) {
  const account = useAccount();
  const [typed, setTyped] = useState('');
  const [at, setAt] = useState(0);
  const id = useId(), list = useRef();
  const text = typed.trim();
  const credentials = useCredentials(text, account.can('vault:read'));
  const options = [
    ...matching(actions, 'Action', text, account), ...matching(pages, 'Page', text, account),
    ...credentials.list.map(c => ({key: c.credential_id, name: c.name, to: '/vault/' + c.credential_id, kind: 'Credential'})),
  ];
  const chosen = Math.min(at, options.length - 1);
  useEffect(() => { list.current?.querySelector('[aria-selected=true]')?.scrollIntoView({block: 'nearest'}); }, [chosen, options.length]);
  const go = option => {
    if (!option) return;
    onClose();
    navigate(option.to);
  };
  const keys = e => {
    const to = {ArrowDown: chosen + 1, ArrowUp: chosen - 1, Home: 0, End: options.length - 1}[e.key];
    if (e.isComposing) return;
    if (e.key === 'Enter') {
      e.preventDefault();
      go(options[chosen]);
    } else if (to !== undefined && options.length > 0 && !((e.key === 'Home' || e.key === 'End') && e.shiftKey)) {
      e.preventDefault();
      setAt((to + options.length) % options.length);
    }
  };
  const said = credentials.looking ? 'Looking for credentials' : credentials.failed ? 'Credentials could not be looked for' : options.length === 0 ? 'Nothing found' : `${options.length} found`;
  return html`<${Dialog} title="Search" onClose=${onClose}>
    <div class="palette">
      <input type="text" role="combobox" aria-label="Page, action or credential" aria-expanded="true" aria-autocomplete="list" aria-controls=${id} aria-activedescendant=${options.length > 0 ? id + '-' + chosen : undefined}
        dir="auto" spellcheck=${false} autocomplete="off" maxlength="255" placeholder="Page, action or credential" autofocus value=${typed} onInput=${e => { setTyped(e.target.value); setAt(0); }} onKeyDown=${keys} />
      <ul id=${id} role="listbox" aria-label="Found" ref=${list}>${options.map((o, i) => html`
        <li key=${o.key} id=${id + '-' + i} role="option" aria-selected=${i === chosen} onMouseDown=${e => e.preventDefault()} onClick=${() => go(o)}>
          <${Name}>${o.name}<//><span class="quiet"><span class="unseen">, </span>${o.kind}</span></li>`)}</ul>
      <p class="quiet" role="status">${said}</p>
    </div>
  <//>`;
}
