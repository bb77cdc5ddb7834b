// Pages are addresses, so that the back button, deep links and bookmarks work.
import {html, createContext, useContext, useLayoutEffect, useState} from '../vendor/preact.js';

const changed = new EventTarget();

// navigate goes to an address of the dashboard, a path with an optional query.
export function navigate(to, {replace = false} = {}) {
  if (to === location.pathname + location.search) replace = true;
  history[replace ? 'replaceState' : 'pushState'](null, '', to);
  changed.dispatchEvent(new Event('change'));
  if (!replace) scrollTo(0, 0);
}

const Here = createContext({path: '/', query: new URLSearchParams(), params: {}});

// useHere returns {path, query, params} of the page that is shown.
export const useHere = () => useContext(Here);

// setQuery changes fields of the query in place; empty ones are left out. What is
// typed replaces the address, what is chosen adds to the history.
export function setQuery(fields, options) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(fields)) {
    if (value) query.set(name, value);
    else query.delete(name);
  }
  const text = query.toString();
  navigate(location.pathname + (text && '?' + text), options);
}

// Link is an anchor that does not load the page anew.
export function Link({to, children, ...more}) {
  const follow = e => {
    if (e.defaultPrevented || e.button !== 0 || e.metaKey || e.ctrlKey || e.shiftKey || e.altKey) return;
    e.preventDefault();
    navigate(to);
  };
  return html`<a href=${to} onClick=${follow} ...${more}>${children}</a>`;
}

// match returns the first of routes whose pattern, such as /vault/:id, fits the path,
// with the parameters that it has.
export function match(routes, path) {
  const parts = path.split('/');
  for (const route of routes) {
    const want = route.path.split('/');
    if (want.length !== parts.length) continue;
    const params = {};
    const fits = want.every((part, i) => {
      if (!part.startsWith(':')) return part === parts[i];
      if (parts[i] === '') return false;
      try {
        params[part.slice(1)] = decodeURIComponent(parts[i]);
      } catch {
        return false;
      }
      return true;
    });
    if (fits) return {route, params};
  }
  return null;
}

// Router hands what fits the address to show, as ({route, params}) or null.
export function Router({routes, show}) {
  const [, again] = useState(0);
  useLayoutEffect(() => { // before the first navigate
    const update = () => again(n => n + 1);
    changed.addEventListener('change', update);
    addEventListener('popstate', update);
    return () => {
      changed.removeEventListener('change', update);
      removeEventListener('popstate', update);
    };
  }, []);
  const path = location.pathname;
  const found = match(routes, path);
  const here = {path, query: new URLSearchParams(location.search), params: found?.params ?? {}};
  return html`<${Here.Provider} value=${here}>${show(found)}<//>`;
}
