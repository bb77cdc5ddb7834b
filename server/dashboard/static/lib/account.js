// Who is signed in, for every page.
import {createContext, useContext} from '../vendor/preact.js';

export const Account = createContext(null);

// useAccount returns {principal, tenant, user, can(scope), writes, reload}: writes says
// whether the plan allows changes.
export const useAccount = () => useContext(Account);

// What takes a verified address says so, to whom has none.
export const unverified = ({user}) => user && !user.email_verified ? {403: 'This takes a verified e-mail address. Follow the link in the mail that came when you registered.'} : {};
