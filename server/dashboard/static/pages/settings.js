// Settings: what belongs to the organisation and to the user. Each part has a file of its own, which is fetched when
// the part is first gone to.
import {html, useEffect, useRef, useState} from '../vendor/preact.js';
import {useAccount} from '../lib/account.js';
import {Empty, Link, Page, Skeleton, Trouble, useHere} from '../lib/ui.js';

const part = (title, file, name, scope) => ({title, scope, load: () => import(`./settings/${file}.js`).then(module => module[name])});
const admin = 'account:admin';

const parts = {
  'api-keys': part('API keys', 'api-keys', 'APIKeys', admin),
  members: part('Members', 'members', 'Members', admin),
  policies: part('Policies', 'policies', 'Policies', admin),
  groups: part('Groups', 'groups', 'Groups', admin),
  webhooks: part('Webhooks', 'webhooks', 'Webhooks', admin),
  rules: part('Rules', 'rules', 'Rules', admin),
  profile: part('Profile', 'account', 'Profile'),
  password: part('Password', 'account', 'ChangePassword'),
  sessions: part('Sessions', 'account', 'Sessions'),
  plan: part('Plan', 'account', 'Plan'),
};

export function Settings() {
  const account = useAccount();
  const {params} = useHere();
  const name = params.part ?? (account.can(admin) ? 'api-keys' : 'profile');
  const is = Object.hasOwn(parts, name) ? parts[name] : {title: 'Settings'};
  const tabs = useRef();
  useEffect(() => { // the tab that is open is in sight, however narrow the row
    const nav = tabs.current, middle = e => e.getBoundingClientRect().left + e.clientWidth / 2;
    const watch = new ResizeObserver(() => {
      const open = nav.querySelector('[aria-current]');
      if (open) nav.scrollLeft += middle(open) - middle(nav);
    });
    watch.observe(nav);
    return () => watch.disconnect();
  }, [name]);
  const open = p => !p.scope || account.can(p.scope);
  return html`<${Page} title=${is.title}>
    <nav class="row tabs" aria-label="Settings" ref=${tabs}>${Object.entries(parts).filter(([, p]) => open(p)).map(([to, p]) => html`
      <${Link} key=${to} to=${'/settings/' + to} aria-current=${p === is ? 'page' : undefined}>${p.title}<//>`)}</nav>
    ${!is.load ? html`<${Empty} title="There is no such part of the settings"><p>Choose one of those above.</p><//>`
    : !open(is) ? html`<${Empty} title="Your role does not allow this"><p>Owners and admins of your organisation see it. Ask one of them.</p><//>`
    : html`<${Part} key=${name} of=${is} />`}
  <//>`;
}

// Part is a part, once its file is there.
function Part({of}) {
  const [state, setState] = useState({view: of.view});
  useEffect(() => {
    if (!of.view) of.load().then(view => setState({view: of.view = view}), () => setState({failed: true}));
  }, []);
  if (state.failed) {
    return html`<${Trouble} error=${{status: 0, message: ''}} retry=${() => location.reload()}
      texts=${{0: 'A part of the dashboard could not be fetched, or a newer version has replaced it. Load the page again.'}} />`;
  }
  return state.view ? html`<${state.view} />` : html`<${Skeleton} />`;
}
