// The dashboard: the shell around the pages, and who is signed in.
import {html, render, useCallback, useEffect, useLayoutEffect, useState} from './vendor/preact.js';
import {api, belongsTo, get, post, signedOut, whenSignedOut} from './lib/api.js';
import {Account} from './lib/account.js';
import {visible} from './lib/format.js';
import {Icon} from './lib/icons.js';
import {Link, Router, navigate} from './lib/router.js';
import {Themes, applyKept} from './lib/theme.js';
import {Act, Address, Dialog, Loaded, Messages, Name, Page, Skeleton, Time, Trouble, say, useHere, useLoad} from './lib/ui.js';
import {SignInForm} from './pages/entry.js';

const icon = new URL('./icon.svg', import.meta.url).href;

// A page is fetched when it is first gone to.
const page = (path, file, name, section) => ({path, section, load: () => import(`./pages/${file}.js`).then(module => module[name])});
const entry = (path, name) => ({...page(path, 'entry', name), public: true});

const routes = [
  entry('/sign-in', 'SignIn'), entry('/register', 'Register'), entry('/verify', 'Verify'),
  entry('/forgot', 'Forgot'), entry('/reset', 'Reset'), entry('/join', 'Join'),
  page('/', 'overview', 'Overview', '/'),
  page('/vault', 'vault', 'Vault', '/vault'),
  page('/vault/new', 'vault', 'NewCredential', '/vault'),
  page('/vault/:id', 'credential', 'Credential', '/vault'),
  page('/crypto', 'crypto', 'Crypto', '/crypto'),
  page('/keys', 'keys', 'Keys', '/keys'),
  page('/keys/:id', 'keys', 'Key', '/keys'),
  page('/compliance', 'compliance', 'Compliance', '/compliance'),
  page('/compliance/report', 'report', 'ReportBuilder', '/compliance'),
  page('/compliance/:framework', 'compliance', 'Framework', '/compliance'),
  page('/audit', 'audit', 'Audit', '/audit'),
  page('/audit/:sequence', 'entry-detail', 'Entry', '/audit'),
  page('/cluster', 'cluster', 'Cluster', '/cluster'),
  page('/cluster/seal', 'seal', 'Seal', '/cluster'),
  page('/settings', 'settings', 'Settings', '/settings/api-keys'),
  page('/settings/:part', 'settings', 'Settings', '/settings/api-keys'),
];

const sections = [
  ['/', 'Overview', 'LayoutDashboard'], ['/vault', 'Vault', 'Vault', 'vault:read'], ['/crypto', 'Encrypt and sign', 'Signature'], ['/keys', 'Keys', 'KeyRound', 'keys:read'],
  ['/compliance', 'Compliance', 'ShieldCheck', 'compliance:read'], ['/audit', 'Audit', 'ScrollText', 'audit:read'], ['/cluster', 'Cluster', 'Ship', 'vault:read'],
  ['/settings/api-keys', 'Settings', 'Settings'],
];

const loaded = new Map();

// Shown is the page of a route, once its file is there.
function Shown({route}) {
  const [, again] = useState(0);
  const {path} = useHere();
  const state = loaded.get(route);
  useEffect(() => {
    if (loaded.has(route)) return;
    route.load().then(view => loaded.set(route, {view}), error => loaded.set(route, {error})).then(() => again(n => n + 1));
  }, [route]);
  if (state?.error) {
    return html`<${Trouble} error=${{status: 0, message: ''}} retry=${() => location.reload()}
      texts=${{0: 'A part of the dashboard could not be fetched, or a newer version has replaced it. Load the page again.'}} />`;
  }
  if (!state) return html`<${Skeleton} />`;
  return html`<${state.view} key=${path} />`; // another object of the same kind is another page
}

// Missing is also for those who are not signed in.
function Missing() {
  return html`<${Page} title="This page does not exist"><p>The address may be incomplete. <${Link} to="/">Go to the overview<//>.</p><//>`;
}

const Outside = ({children}) => html`<div class="entry"><div><header><a class="brand" href="/"><img src=${icon} alt="" /> Latticekeep</a></header><main id="main" class="panel">${children}</main></div></div>`;

const mac = /Mac|iPhone|iPad/.test(navigator.platform);

// useFinder returns a function that opens the command palette, as Ctrl-K does, and the palette while it is open. It
// is fetched when it is first asked for.
function useFinder(signOut) {
  const [open, setOpen] = useState(false);
  const [Palette, setPalette] = useState(null);
  const find = useCallback(() => {
    setOpen(true);
    import('./lib/palette.js').then(module => setPalette(() => module.Palette), () => {
      setOpen(false);
      say('The search could not be fetched. Load the page again.', 'bad');
    });
  }, []);
  useEffect(() => {
    const press = e => {
      if (e.key?.toLowerCase() !== 'k' || !(mac ? e.metaKey : e.ctrlKey) || e.altKey || e.shiftKey || !document.querySelector('.finder')) return;
      e.preventDefault();
      if (!document.querySelector('dialog[open]')) find();
    };
    addEventListener('keydown', press);
    return () => removeEventListener('keydown', press);
  }, []);
  return [find, open && Palette && html`<${Palette} key="find" signOut=${signOut} onClose=${() => setOpen(false)} />`];
}

function Side({account, section, signOut, find}) {
  const [open, setOpen] = useState(false);
  const {path} = useHere();
  useEffect(() => setOpen(false), [path]);
  const settings = account.can('account:admin') ? '/settings/api-keys' : '/settings/profile'; // what one may see of them
  return html`<header class=${'side' + (open ? ' open' : '')} onKeyDown=${e => { if (e.key === 'Escape') setOpen(false); }}>
    <${Link} class="brand" to="/"><img src=${icon} alt="" /> Latticekeep<//>
    <button type="button" class="finder" aria-keyshortcuts=${mac ? 'Meta+K' : 'Control+K'} onClick=${find}><${Icon} name="Search" /> Search <kbd aria-hidden="true">${mac ? '⌘K' : 'Ctrl K'}</kbd></button>
    <button type="button" class="menu" aria-expanded=${open} aria-controls="sections" onClick=${() => setOpen(!open)}>Menu</button>
    <nav id="sections" aria-label="Sections"><ul>${sections.filter(([, , , scope]) => !scope || account.can(scope)).map(([to, text, icon]) => html`
      <li key=${to}><${Link} to=${to.startsWith('/settings/') ? settings : to} aria-current=${section === to ? 'page' : undefined}><${Icon} name=${icon} />${text}<//></li>`)}</ul></nav>
    <div class="who">
      <span><${Name}>${account.tenant.name}<//></span>
      <span class="quiet">${account.user ? html`<${Address}>${account.user.email}<//>, ${account.user.role}` : ''}</span>
      <${Act} onClick=${signOut}>Sign out<//>
      <div class="row"><a href="/docs" target="_blank" rel="noopener"><${Icon} name="BookOpen" />API</a>
        ${account.server && html`<a href=${account.server.documentation} target="_blank" rel="noopener noreferrer"><${Icon} name="CircleHelp" />Help</a>`}</div>
      <${Themes} />
      ${account.server && html`<span class="quiet" title=${account.server.version}>Version ${visible(account.server.version.slice(0, 20))}</span>`}
    </div>
  </header>`;
}

// Standing says what of the account needs attention on every page.
function Standing({account}) {
  const {tenant, user} = account;
  const resend = () => api('POST', '/api/v2/auth/resend-verification');
  return html`
    ${user && !user.email_verified && html`<div class="notice row between"><span>Your address <${Name}>${user.email}<//> is not verified yet: follow the link in the mail.</span>
      <${Act} onClick=${resend} done="The mail is on its way">Send it again<//></div>`}
    ${tenant.status === 'read_only' && html`<p class="notice">The trial has ended: you can read, decrypt, verify, delete and revoke. Ask the operator of this service to activate the plan.</p>`}
    ${tenant.status === 'trial' && tenant.trial_ends_at && new Date(tenant.trial_ends_at) - Date.now() < 5 * 86400e3 && html`<p class="notice">The trial ends <${Time} at=${tenant.trial_ends_at} relative />. Ask the operator of this service to activate the plan.</p>`}`;
}

// Inside is everything behind signing in.
function Inside({found, question, answer}) {
  const account = useLoad(async signal => {
    const me = await get('/api/v2/auth/me', undefined, signal);
    return belongsTo(me.user?.user_id) ? me : new Promise(() => {});
  }, []);
  const signOut = useCallback(async () => {
    await post('/api/v2/auth/logout', undefined, {anonymous: true}).catch(error => { if (error.status !== 401) throw error; });
    signedOut();
    location.assign('/sign-in'); // a page load, so that nothing of this session stays in memory
  }, []);
  const [find, palette] = useFinder(signOut);
  const again = question && html`<${SignInAgain} key="again" email=${account.data?.user?.email} done=${async () => {
    const now = await get('/api/v2/auth/me');
    answer(belongsTo(now.user?.user_id)); // to somebody else nothing of before is shown, and nothing is sent in their name
  }} />`;
  if (!account.data) return html`<main id="main" class="bare"><${Loaded} of=${account}>${() => ''}<//></main>${again}`;
  const {principal, tenant} = account.data;
  const value = {...account.data, can: scope => principal.scopes.includes(scope), reload: account.reload, writes: tenant.status !== 'read_only'};
  return html`<${Account.Provider} value=${value}>
    <div class="shell">
      <a class="skip" href="#main" onClick=${e => { e.preventDefault(); document.querySelector('main h1')?.focus(); }}>Skip to the content</a>
      <${Side} account=${value} section=${found.route.section} signOut=${signOut} find=${find} />
      <main id="main"><${Standing} account=${value} /><${Shown} route=${found.route} /></main>
    </div>
    ${palette}
    ${again}
  <//>`;
}

// SignInAgain is asked for when the session ends under a page: it lies over the page,
// which stays as it is, with all that was entered.
const SignInAgain = ({email, done}) => html`<${Dialog} title="Your session has ended" fixed>
  <p>Sign in again to go on where you were. Nothing that you entered is lost.</p>
  <${SignInForm} email=${email} fixed=${!!email} done=${done} />
  <p><a href="/sign-in">Leave this page and sign in as somebody else</a></p>
<//>`;

function App() {
  const [question, setQuestion] = useState(null);
  useLayoutEffect(() => { // before the first answer can come, which may be a 401
    // Before anybody has signed in there is no page to stay on.
    whenSignedOut(() => {
      if (!document.querySelector('.shell')) {
        navigate('/sign-in?next=' + encodeURIComponent(location.pathname + location.search), {replace: true});
        return Promise.resolve(false);
      }
      return new Promise(resolve => setQuestion({resolve}));
    });
  }, []);
  const answer = useCallback(signedIn => setQuestion(q => { q?.resolve(signedIn); return null; }), []);
  return html`
    <${Router} routes=${routes} show=${found => {
      if (!found) return html`<${Outside}><${Missing} /><//>`;
      if (found.route.public) return html`<${Outside}><${Shown} key=${found.route.path} route=${found.route} /><//>`;
      return html`<${Inside} key="inside" found=${found} question=${question} answer=${answer} />`;
    }} />
    <${Messages} />`;
}

applyKept();
addEventListener('unhandledrejection', e => console.error('unhandled', e.reason?.name ?? 'rejection'));
render(html`<${App} />`, document.getElementById('app'));
