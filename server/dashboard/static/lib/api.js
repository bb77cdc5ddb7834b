// The one way to the data: /api/v2, with the cookies of the session. Nothing that is
// fetched is kept anywhere but in the memory of the page.

// A Problem is a request that did not succeed. status is the HTTP status, or 0 when
// no answer came; message is the server's own, which never repeats what was sent.
export class Problem extends Error {
  constructor(status, message, {requestID = '', retryAfter = 0} = {}) {
    super(message);
    this.status = status;
    this.requestID = requestID;
    this.retryAt = retryAfter > 0 ? Date.now() + retryAfter * 1000 : 0;
  }
}

// signInAgain is set by the page: it asks the user to sign in over whatever is on
// the screen, and resolves to whether that was done. Without it a 401 is a Problem.
let signInAgain = null;
let asking = null; // the question that is open

export function whenSignedOut(ask) {
  signInAgain = ask;
}

// Whose page this is. All tabs have the same cookies: when somebody else signs in, in
// this tab or in another one, what is on the screen is not theirs, and nothing that was
// begun here may go out in their name.
let owner, left = false;
const tabs = 'BroadcastChannel' in globalThis ? new BroadcastChannel('latticekeep-user') : null;

// belongsTo says whose session it is, and reports whether it is of whom the page is of.
// If it is not, the page begins anew, and sends nothing any more.
export function belongsTo(user) {
  owner ??= user;
  if (owner !== user && !left) {
    left = true;
    location.assign('/');
  }
  if (!left) tabs?.postMessage(user);
  return !left;
}

// signedOut says so to the other tabs, which show nothing of the session any more.
export const signedOut = () => tabs?.postMessage(null);

if (tabs) tabs.onmessage = ({data}) => { if (owner !== undefined && data !== owner) belongsTo(data); };

const never = new Promise(() => {}); // of a page that is left

// api sends a request and returns the answer's body. query is an object of which
// empty fields are left out; body is sent as JSON. A 401 is met with new tokens and,
// when there are none, by asking the user; then the request is sent once more.
// Error: Problem; an AbortError when signal says so.
export async function api(method, path, {query, body, signal, headers, anonymous = false, text = false} = {}) {
  const send = () => left ? never : exchange(method, path + queryString(query), {body, signal, headers, text});
  let answer = await send();
  if (answer.status !== 401 || anonymous) return finished(answer);
  if (await renewed()) answer = await send();
  if (answer.status === 401 && signInAgain) {
    asking ??= signInAgain().finally(() => { asking = null; });
    if (await asking) answer = await send();
  }
  return finished(answer);
}

export const get = (path, query, signal) => api('GET', path, {query, signal});
export const post = (path, body, more) => api('POST', path, {...more, body});
export const put = (path, body) => api('PUT', path, {body});
export const patch = (path, body, more) => api('PATCH', path, {...more, body});
export const del = path => api('DELETE', path);

// gather reads a page of a list that is searched: where the server stops looking before
// query.limit are found, it goes on, some times. Its answer is like that of one request,
// field being the name of the list in it, beside which there may be folders.
export async function gather(path, field, query, signal, times = 8) {
  let found = [], folders = [], cursor = query.cursor;
  const missing = () => query.limit - found.length - folders.length;
  do {
    const page = await get(path, {...query, cursor, limit: missing()}, signal);
    found = [...found, ...page[field]];
    folders = [...folders, ...page.folders ?? []];
    cursor = page.next_cursor;
  } while (cursor && missing() > 0 && --times > 0);
  return {[field]: found, folders, next_cursor: cursor};
}

export function queryString(query) {
  const given = Object.entries(query ?? {}).filter(([, v]) => v !== undefined && v !== null && v !== '');
  return given.length === 0 ? '' : '?' + new URLSearchParams(given);
}

async function exchange(method, url, {body, signal, headers, text}) {
  let response;
  try {
    response = await fetch(url, {
      method, signal, credentials: 'same-origin', redirect: 'error', cache: 'no-store',
      headers: body === undefined ? headers : {...headers, 'Content-Type': 'application/json'},
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    const content = await response.text();
    if (response.ok && text) return {status: response.status, content};
    return {status: response.status, content: content === '' ? {} : JSON.parse(content), headers: response.headers};
  } catch (err) {
    if (err.name === 'AbortError') throw err;
    return {status: response && response.status >= 500 ? response.status : 0, content: {}, headers: response?.headers};
  }
}

function finished({status, content, headers}) {
  if (status >= 200 && status < 300) {
    const etag = headers?.get('ETag');
    return etag ? {...content, etag} : content;
  }
  throw new Problem(status, content.error?.message ?? '', {
    requestID: content.error?.request_id ?? headers?.get('X-Request-ID') ?? '',
    retryAfter: Number(headers?.get('Retry-After') ?? 0),
  });
}

let renewing = null;

// renewed exchanges the refresh token for new tokens. It can be used once, and a
// second use ends the session: so of all tabs one asks at a time, and the others
// look first whether that has helped them too. keepalive lets the answer arrive
// when the page is left meanwhile. Whoever asks looks whose tokens they are, which
// another tab may have got for another user.
function renewed() {
  renewing ??= alone(async () => {
    if (await alive()) return true;
    const response = await fetch('/api/v2/auth/refresh', {method: 'POST', credentials: 'same-origin', cache: 'no-store', keepalive: true});
    return response.ok && alive();
  }).catch(() => false).finally(() => { renewing = null; });
  return renewing;
}

async function alive() {
  const {status, content} = await exchange('GET', '/api/v2/auth/me', {});
  if (status === 200) belongsTo(content.user?.user_id);
  return status === 200;
}

// Browsers lock only in secure contexts; elsewhere the cookies do not work either,
// but for plain HTTP on loopback, which is one.
function alone(task) {
  return navigator.locks ? navigator.locks.request('latticekeep-session', task) : task();
}

// tokenFromAddress returns the token of a mailed link, which is in the fragment so
// that no server, proxy or referrer sees it, and takes it out of the address and the
// history.
export function tokenFromAddress() {
  const token = new URLSearchParams(location.hash.slice(1)).get('token') ?? '';
  if (location.hash !== '') history.replaceState(history.state, '', location.pathname + location.search);
  return token;
}
