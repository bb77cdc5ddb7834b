// The pages before signing in.
import {html, useEffect, useRef, useState} from '../vendor/preact.js';
import {post, tokenFromAddress} from '../lib/api.js';
import {Form, Input, Link, Name, Password, navigate, useHere} from '../lib/ui.js';

const newPassword = 'At least 12 characters. Use a passphrase.';

let arrived = false; // the browser itself gives a field the focus, but on the first page alone

// Heading takes the focus when its page comes, unless a field of the page is to have it.
function Heading({title}) {
  const heading = useRef();
  useEffect(() => {
    document.title = `${title} · Latticekeep`;
    const field = document.querySelector('main [autofocus]');
    if (document.activeElement === document.body && (arrived || !field)) (field ?? heading.current).focus();
    arrived = true;
  }, [title]);
  return html`<h1 tabindex="-1" ref=${heading}>${title}</h1>`;
}

// The address to go to after signing in, if it is one of ours.
function next(query) {
  const to = query.get('next') ?? '/';
  try {
    const url = new URL(to, location.origin);
    const ours = to.startsWith('/') && url.origin === location.origin && !url.pathname.startsWith('//'); // a path of two is another host
    return ours ? url.pathname + url.search : '/';
  } catch {
    return '/';
  }
}

export function SignInForm({email: known = '', fixed = false, done}) {
  const [email, setEmail] = useState(known);
  const [password, setPassword] = useState('');
  const signIn = async () => {
    await post('/api/v2/auth/login', {email, password}, {anonymous: true});
    setPassword('');
    await done();
  };
  return html`<${Form} onSubmit=${signIn} submit="Sign in" texts=${{
    401: ['Not signed in', 'The address and the password do not belong together, or there were too many attempts. Check both and try again after a while.']}}>
    <${Input} label="E-mail address" type="email" autocomplete="username" readonly=${fixed} value=${email} onInput=${setEmail} autofocus=${!known} />
    <${Password} label="Password" autocomplete="current-password" value=${password} onInput=${setPassword} autofocus=${!!known} />
  <//>`;
}

export function SignIn() {
  const {query} = useHere();
  return html`<${Heading} title="Sign in" />
    <div class="stack">
      <${SignInForm} done=${() => navigate(next(query), {replace: true})} />
      <p class="links"><${Link} to="/register">Register<//><${Link} to="/forgot">Forgot your password?<//></p>
    </div>`;
}

export function Register() {
  const [email, setEmail] = useState('');
  const [password, setPassword] = useState('');
  const [organisation, setOrganisation] = useState('');
  const register = async () => {
    await post('/api/v2/auth/register', {email, password, tenant_name: organisation}, {anonymous: true});
    await post('/api/v2/auth/login', {email, password}, {anonymous: true});
    setPassword('');
    navigate('/');
  };
  return html`<${Heading} title="Register" />
    <div class="stack">
      <${Form} onSubmit=${register} submit="Register" texts=${{
        409: 'This address has an account already. Sign in, or have your password reset.',
        403: 'This service takes no registrations. Ask an owner of your organisation for an invitation.'}}>
        <${Input} label="Organisation" hint="Shown to its members." maxlength="255" autocomplete="organization" value=${organisation} onInput=${setOrganisation} autofocus />
        <${Input} label="E-mail address" type="email" autocomplete="username" hint="We will e-mail you a verification link." value=${email} onInput=${setEmail} />
        <${Password} label="Password" autocomplete="new-password" minlength="12" maxlength="1024" hint=${newPassword} value=${password} onInput=${setPassword} />
      <//>
      <p class="links"><${Link} to="/sign-in">Sign in instead<//></p>
    </div>`;
}

// Mailed links only bring the token: a press of the button spends it, since mail
// scanners open links too.
function useToken() {
  const [token, setToken] = useState(tokenFromAddress);
  useEffect(() => { // a link that is opened where the page is already loads nothing
    const take = () => setToken(before => tokenFromAddress() || before);
    addEventListener('hashchange', take);
    return () => removeEventListener('hashchange', take);
  }, []);
  return token;
}

const used = ['The link does not work', 'It has been used or is too old. Ask for a new one.'];
const spent = {400: used, 401: used, 403: used};

const NoToken = ({children}) => html`<div class="stack"><p>This page is reached by the link in a mail, which can be used once. Open the link again, whole and as it is.</p><p class="links">${children}</p></div>`;

export function Verify() {
  const token = useToken();
  const [done, setDone] = useState(false);
  if (done) return html`<${Heading} title="Your address is verified" /><p class="links"><a class="button primary" href="/">Continue</a></p>`;
  return html`<${Heading} title="Verify your address" />
    ${token ? html`<${Form} submit="Verify my address" texts=${spent} onSubmit=${async () => {
        await post('/api/v2/auth/verify-email', {token}, {anonymous: true});
        setDone(true);
      }}><p>Press the button to confirm that this address is yours.</p><//>`
    : html`<${NoToken}><${Link} to="/">Go to the overview, where you can have the mail sent again<//><//>`}`;
}

export function Forgot() {
  const [email, setEmail] = useState('');
  const [sent, setSent] = useState('');
  if (sent) {
    return html`<${Heading} title="Check your e-mail" /><div class="stack">
      <p>If <${Name}>${sent}<//> has an account, a mail with a link is on its way. The link can be used once.</p>
      <p class="links"><${Link} to="/sign-in">Back to signing in<//></p></div>`;
  }
  return html`<${Heading} title="Reset your password" />
    <div class="stack">
      <${Form} submit="Send me a link" onSubmit=${async () => {
        await post('/api/v2/auth/forgot-password', {email}, {anonymous: true});
        setSent(email);
      }}><${Input} label="E-mail address" type="email" autocomplete="username" value=${email} onInput=${setEmail} autofocus /><//>
      <p class="links"><${Link} to="/sign-in">Back to signing in<//></p>
    </div>`;
}

export function Reset() {
  const token = useToken();
  const [password, setPassword] = useState('');
  const [done, setDone] = useState(false);
  if (done) {
    return html`<${Heading} title="Your password is changed" /><div class="stack"><p>All sessions have ended.</p>
      <p class="links"><${Link} class="button primary" to="/sign-in">Sign in<//></p></div>`;
  }
  return html`<${Heading} title="Choose a new password" />
    ${token ? html`<${Form} submit="Change my password" texts=${spent} onSubmit=${async () => {
        await post('/api/v2/auth/reset-password', {token, new_password: password}, {anonymous: true});
        setPassword('');
        setDone(true);
      }}><${Password} label="New password" autocomplete="new-password" minlength="12" maxlength="1024" hint=${newPassword} value=${password} onInput=${setPassword} autofocus /><//>`
    : html`<${NoToken}><${Link} to="/forgot">Have a new link sent<//><//>`}`;
}

export function Join() {
  const token = useToken();
  const [password, setPassword] = useState('');
  const [done, setDone] = useState(false);
  if (done) return html`<${Heading} title="Welcome" /><div class="stack"><p>Account created.</p><p class="links"><${Link} class="button primary" to="/sign-in">Sign in<//></p></div>`;
  return html`<${Heading} title="Accept the invitation" />
    ${token ? html`<${Form} submit="Join" texts=${{...spent, 409: 'This address has an account already. Sign in with it, or ask for an invitation to another address.'}} onSubmit=${async () => {
        await post('/api/v2/auth/accept-invitation', {token, password}, {anonymous: true});
        setPassword('');
        setDone(true);
      }}><${Password} label="Choose a password" autocomplete="new-password" minlength="12" maxlength="1024" hint=${newPassword} value=${password} onInput=${setPassword} autofocus /><//>`
    : html`<${NoToken}><${Link} to="/sign-in">Sign in<//><//>`}`;
}
