// Who is signed in, for every page.
import {createContext, useContext} from '../vendor/preact.js';

export const Account = createContext(null);

// useAccount returns {principal, tenant, user, can(scope), writes, reload}: writes says
// whether the plan allows changes.
export const useAccount = () => useContext(Account);
