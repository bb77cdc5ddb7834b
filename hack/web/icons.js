export {
  BookOpen, Check, CircleHelp, Copy, Folder, KeyRound, LayoutDashboard, Monitor, Moon, ScrollText, Search, Settings, ShieldCheck, Ship, Signature,
  Sun, Vault,
} from "lucide";
