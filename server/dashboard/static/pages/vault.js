// The vault: the list of credentials, and sealing a new one.
import {html, useEffect, useRef, useState} from '../vendor/preact.js';
import {useAccount} from '../lib/account.js';
import {gather, post} from '../lib/api.js';
import {count, localDay, number, overTLS} from '../lib/format.js';
import {Rows, checkRows, fromRows, newRow} from '../lib/rows.js';
import {Empty, Filter, Form, Input, LastRead, Link, Loaded, Name, Page, Pages, Panel, Search, Skeleton, Table, Tag, Time, navigate, say, setQuery, useHere, useLoad} from '../lib/ui.js';
import {Icon} from '../lib/icons.js';

const pageSize = 50;
const dayLength = 86400e3;
const soon = 7; // days

// Types that are common. Others are as good.
const commonTypes = ['api_key', 'basic_auth', 'certificate', 'database', 'oauth_client', 'ssh_key', 'token', 'webhook_secret'];
const typePattern = '[a-zA-Z0-9][\\-._a-zA-Z0-9]{0,62}';

export const trialEnded = 'The trial has ended. Credentials can be read and deleted until the operator of this service activates the plan.';

// State says whether a credential can be read and, unless it is bare, until when.
export function State({of, bare = false}) {
  const expired = of.status === 'expired', near = new Date(of.expires_at) - Date.now() < soon * dayLength;
  const [kind, text] = of.trashed ? ['warn', 'in the trash'] : expired ? ['bad', 'expired'] : near ? ['warn', 'expires soon'] : ['good', 'active'];
  return html`${(bare || kind !== 'good') && html`<${Tag} kind=${kind}>${text}<//> `}${!bare && html`<span class="quiet">${of.never_expires ? 'never' : html`<${Time} at=${of.expires_at} relative />`}</span>`}`;
}

export const Tags = ({of: tags = []}) => tags.length > 0 && html`<span class="row tight">${tags.map(tag => html`<${Link} key=${tag} class="tag plain" to=${'/vault?tag=' + encodeURIComponent(tag)}><${Name}>${tag}<//><//>`)}</span>`;

// The end of the day so many days from now: it stays the same from page to page, as it
// must, since a cursor belongs to one selection.
function endOfDay(days) {
  const end = new Date(Date.now() + days * dayLength);
  end.setUTCHours(24, 0, 0, 0);
  return end.toISOString();
}

// What the address says of the list. Folders are shown until somebody searches, or sorts by a time: then all
// that is in the folder is one list.
const narrowing = ['q', 'status', 'type', 'tag', 'within'], selecting = ['folder', ...narrowing, 'sort'];
const isFlat = query => [...narrowing, 'sort'].some(name => query.get(name));

function useList(query) {
  const fields = [...selecting, 'cursor'].map(name => query.get(name) ?? '');
  return useLoad(async signal => {
    const [folder, q, status, type, tag, within, sort, cursor] = fields;
    const days = /^[1-9]\d{0,3}$/.test(within) ? Number(within) : 0;
    const selection = {prefix: folder, q, status, credential_type: type, tag, expires_before: days ? endOfDay(days) : '', limit: pageSize};
    const read = more => gather('/api/v2/vault/list', 'credentials', {...selection, ...more, cursor}, signal);
    try {
      return await read(isFlat(query) ? {sort: sort || 'name'} : {delimiter: '/'});
    } catch (error) {
      if (error.status === 503 && sort === '') return read({}); // the names of an earlier release are not indexed yet
      // An address that was kept for long may have a cursor of another day's selection.
      if (error.status !== 400 || cursor === '') throw error;
      setQuery({cursor: ''}, {replace: true});
      return new Promise(() => {}); // the change of the address loads the first page
    }
  }, fields);
}

const inFolder = folder => '/vault' + (folder && '?folder=' + encodeURIComponent(folder));

// Path leads up from a folder.
function Path({folder}) {
  if (!folder) return '';
  const parts = folder.split('/').slice(0, -1);
  return html`<nav class="path" aria-label="Folder"><${Link} to="/vault">Vault<//>${parts.map((part, i) => {
    const to = parts.slice(0, i + 1).join('/') + '/';
    return html`<span key=${to}><span aria-hidden="true"> / </span><${Link} to=${inFolder(to)} aria-current=${to === folder ? 'page' : undefined}><${Name}>${part}<//><//></span>`;
  })}</nav>`;
}

export function Vault() {
  const account = useAccount();
  const {query} = useHere();
  const list = useList(query);
  const folder = query.get('folder') ?? '';
  const types = [...new Set([...(list.data?.credentials ?? []).map(c => c.credential_type), ...commonTypes])].sort();
  const narrowed = narrowing.some(name => query.get(name));
  const clear = () => setQuery(Object.fromEntries([...narrowing, 'sort', 'cursor'].map(name => [name, ''])));
  return html`<${Page} title="Vault" lead="Credentials of your organisation. Each is encrypted under its own ML-KEM-768 key pair. Only the values are secret." actions=${account.can('vault:write') && html`<${NewButton} folder=${folder} />`}>
    <div class="filters" role="search">
      <${Search} label="Search by name" maxlength="255" />
      <${Filter} label="Status" name="status" options=${[['', 'Any'], ['active', 'Active'], ['expired', 'Expired or in the trash']]} />
      <${Search} label="Type" name="type" maxlength="63" list="types" />
      <${Search} label="Tag" name="tag" maxlength="64" />
      <${Filter} label="Expires" name="within" options=${[['', 'At any time'], ['7', 'Within 7 days'], ['30', 'Within 30 days'], ['90', 'Within 90 days'], ['365', 'Within 365 days']]} />
      <${Filter} label="Sort by" name="sort" options=${[['', 'Name'], ['updated', 'Updated'], ['created', 'Created'], ['expires', 'Expires'], ['last_read', 'Last read'], ['unread', 'Longest unused']]} />
      <datalist id="types">${types.map(type => html`<option key=${type} value=${type}></option>`)}</datalist>
    </div>
    <${Path} folder=${folder} />
    <${Loaded} of=${list} lines=${6}>${({credentials, folders, next_cursor: next}) => {
      const shown = [folders.length > 0 && count(folders.length, 'folder'), (credentials.length > 0 || folders.length === 0) && count(credentials.length, 'credential')].filter(Boolean).join(', ');
      if (credentials.length + folders.length > 0) {
        return html`<${List} folder=${folder} folders=${folders} credentials=${credentials} flat=${isFlat(query)} sort=${query.get('sort') ?? ''} /><${Pages} next=${next} shown=${shown} />`;
      }
      if (list.loading) return html`<${Skeleton} lines=${6} />`; // what was empty is another selection
      if (next) return html`<${Empty} title="None found so far"><p>Many were looked at; there are more to look at.</p><//><${Pages} next=${next} shown="0 credentials" />`;
      if (query.get('cursor')) return html`<${Empty} title="No more credentials"><p>This is the end of the list.</p><//><${Pages} shown="0 credentials" />`;
      if (narrowed) return html`<${Empty} title="No credential matches"><p>Change or clear the filters. Type and tag have to be entered in full.</p><button type="button" onClick=${clear}>Clear the filters</button><//>`;
      if (folder) return html`<${Empty} title="Nothing in this folder"><p>A folder is there as long as a credential is in it.</p><${Link} class="button" to="/vault">All credentials<//><//>`;
      return html`<${Empty} title="The vault is empty"><p>Create a credential here, or apply a SealedCredential to the cluster.</p>${account.can('vault:write') && html`<${NewButton} />`}<//>`;
    }}<//>
  <//>`;
}

function NewButton({folder = ''}) {
  const account = useAccount();
  return account.writes ? html`<${Link} class="button primary" to=${'/vault/new' + (folder && '?folder=' + encodeURIComponent(folder))}>New credential<//>`
    : html`<button type="button" class="primary" disabled aria-describedby="ended">New credential</button><p class="hint" id="ended">Not possible since the trial has ended.</p>`;
}

// List has the folders first, then the credentials, which are called by what follows the folder, unless all that
// is below it is one list.
function List({folder, folders, credentials, flat, sort}) {
  const rows = [...folders.map(path => ({folder: path, credential_id: path})), ...credentials];
  const of = cell => row => row.folder ? '' : cell(row);
  return html`<${Table} caption="Credentials" rowKey="credential_id" rows=${rows} sort=${sort} onSort=${to => setQuery({sort: to, cursor: ''})} rowClass=${c => c.folder ? 'alone' : ''} columns=${[
    {title: 'Name', sort: '', cell: c => c.folder
      ? html`<${Link} class="folder" to=${inFolder(c.folder)}><${Icon} name="Folder" /><${Name}>${c.folder.slice(folder.length)}<//><//>`
      : html`<span><${Link} to=${'/vault/' + encodeURIComponent(c.credential_id)}><${Name}>${flat || !c.name.startsWith(folder) ? c.name : c.name.slice(folder.length)}<//><//>${c.owned && html` <${Tag}>Kubernetes<//>`}</span>`},
    {title: 'Type', cell: of(c => html`<${Name}>${c.credential_type}<//>`)},
    {title: 'Tags', cell: of(c => html`<${Tags} of=${c.tags} />`)},
    {title: 'Updated', sort: 'updated', descending: true, class: 'fit', cell: of(c => html`<${Time} at=${c.sealed_at} relative />`)},
    {title: 'Expires', sort: 'expires', class: 'fit', cell: of(c => html`<span><${State} of=${c} /></span>`)},
    {title: 'Last read', sort: 'last_read', descending: true, class: 'fit', cell: of(c => html`<${LastRead} at=${c.last_read_at} />`)},
  ]} />`;
}

const bytes = text => new TextEncoder().encode(text).length;

export const nameError = name => bytes(name) > 255 ? `A name has at most 255 bytes; this one has ${number(bytes(name))}. Letters outside of A to Z count for two or more.`
  : name.trim() === '' && name !== '' ? 'A name of spaces alone cannot be found again.' : '';

// TTL asks for a lifetime in days. Empty means what hint says, where that is allowed.
export function TTL({value, onInput, hint, optional = false}) {
  const days = Number(value), known = value !== '' && Number.isInteger(days) && days >= 1 && days <= 3650;
  const until = known && localDay(new Date(Date.now() + days * dayLength).toISOString());
  return html`<${Input} label="Lifetime in days" type="number" min="1" max="3650" step="1" inputmode="numeric" optional=${optional} value=${value} onInput=${onInput}
    hint=${until ? `It expires on ${until}. ${hint}` : hint} />`;
}

// useRows is the state of a Rows editor. check() says whether the rows are fit to be
// sent; from then on what is wrong shows, and the focus goes to the first of it. begin
// makes the rows that it starts with, instead of an empty one.
export function useRows(begin = () => []) {
  const [rows, setRows] = useState(() => {
    const given = begin();
    return given.length > 0 ? given : [newRow()];
  });
  const [checked, setChecked] = useState(0);
  const box = useRef();
  useEffect(() => { box.current?.querySelector('[aria-invalid=true]')?.focus(); }, [checked]);
  const check = () => {
    const fine = Object.keys(checkRows(rows)).length === 0;
    if (!fine) setChecked(n => n + 1);
    return fine;
  };
  const clear = () => {
    setRows([newRow()]);
    setChecked(0);
  };
  return {rows, setRows, check, clear, errors: checked > 0 ? checkRows(rows) : {}, box};
}

export function NewCredential() {
  const account = useAccount();
  const back = {to: '/vault', text: 'Vault'};
  if (!account.can('vault:write')) {
    return html`<${Page} title="New credential" back=${back}><${Empty} title="Your role does not allow this"><p>Members, admins and owners create credentials. Ask an owner of your organisation.</p><//><//>`;
  }
  if (!account.writes) return html`<${Page} title="New credential" back=${back}><${Empty} title="Not possible now"><p>${trialEnded}</p><//><//>`;
  return html`<${Page} title="New credential" back=${back} lead=${`The values go to the server${overTLS}, are encrypted there and never stored in plain. The name and the type are not secret.`}>
    <${SealForm} />
    ${account.can('vault:read') && html`<p class="quiet">For a workload in Kubernetes you can <${Link} to="/cluster/seal">seal a manifest in the browser<//> instead.</p>`}
  <//>`;
}

// SealForm sends one Idempotency-Key however often it is submitted, so that a repeated
// submit seals once.
function SealForm() {
  const [name, setName] = useState(() => new URLSearchParams(location.search).get('folder') ?? '');
  const [type, setType] = useState('api_key');
  const [days, setDays] = useState('90');
  const rows = useRows();
  const [key, setKey] = useState(() => crypto.randomUUID());
  const [doubt, setDoubt] = useState(''); // 'lost': an attempt may have come through for all that is known; 'refused': it has, with other values
  const wrong = nameError(name);
  const seal = async () => {
    if (wrong || !rows.check()) return;
    const body = {name, credential_type: type, values: fromRows(rows.rows), ttl_days: Number(days)};
    let made;
    try {
      made = await post('/api/v2/vault/seal', body, {headers: {'Idempotency-Key': key}});
    } catch (error) {
      if (error.status === 0 || error.status >= 500) setDoubt('lost');
      else if (error.status === 422 && doubt) setDoubt('refused');
      throw error;
    }
    rows.clear();
    say('The credential is created');
    navigate('/vault/' + encodeURIComponent(made.credential_id), {replace: true}); // the way back leads to the list
  };
  const another = () => {
    setKey(crypto.randomUUID());
    setDoubt('');
    say('Press Create to make it another credential');
  };
  return html`<${Panel} title="Credential"><${Form} onSubmit=${seal} submit="Create" cancel=${() => navigate('/vault')} texts=${{
      403: 'Your role or the plan does not allow this. Ask an owner of your organisation. What you entered is still here.',
      422: doubt ? 'An earlier attempt from this form may have been stored in spite of its failure, with what it had then. Look for it in the vault before you store this as another credential.' : undefined,
      503: 'The service cannot do this at the moment. Press the button again after a while: the credential is stored once, however often you do.',
      0: 'The server could not be reached. Check your connection and press the button again: the credential is stored once, however often you do.',
    }}>
    <div class="narrow stack">
      <${Input} label="Name" hint="A path such as shop/prod/db puts it into folders. Shown in lists, not secret." maxlength="255" error=${wrong} value=${name} onInput=${setName} autofocus />
      <${Input} label="Type" hint="A label of your own: letters, digits, and - . _" class="mono" maxlength="63" pattern=${typePattern} title="Letters from A to Z, digits, and the signs - . _, beginning with a letter or digit"
        list="types" value=${type} onInput=${setType} />
      <datalist id="types">${commonTypes.map(t => html`<option key=${t} value=${t}></option>`)}</datalist>
      <${TTL} value=${days} onInput=${setDays} hint="After that its values cannot be read. Changing them before starts the lifetime again." />
    </div>
    <h3>Values</h3>
    <div ref=${rows.box}><${Rows} rows=${rows.rows} onChange=${rows.setRows} errors=${rows.errors} /></div>
    ${doubt === 'refused' && html`<p>Do you want this as another credential, whether or not the earlier attempt was stored? <button type="button" onClick=${another}>Yes, another one</button></p>`}
  <//><//>`;
}
