package vault

import "testing"

// Variables by which a program finds code are no keys of run; those of applications are.
func TestKeysThatSteerAProgram(t *testing.T) {
	for _, key := range []string{
		"PATH", "LD_PRELOAD", "LD_AUDIT", "DYLD_INSERT_LIBRARIES", "GLIBC_TUNABLES", "LATTICEKEEP_URL",
		"GIT_SSH_COMMAND", "GIT_PAGER", "GIT_PROXY_COMMAND", "GIT_ASKPASS", "GIT_CONFIG_COUNT", "GIT_TEMPLATE_DIR",
		"JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "CLASSPATH",
		"DOTNET_STARTUP_HOOKS", "CORECLR_PROFILER_PATH", "CORECLR_ENABLE_PROFILING",
		"PYTHONPATH", "PYTHONWARNINGS", "PYTHONBREAKPOINT", "PERL5LIB", "PERL5DB", "PERLLIB", "RUBYOPT", "RUBYLIB", "GEM_HOME", "GEM_PATH", "BUNDLE_GEMFILE",
		"LUA_PATH", "LUA_INIT", "LUA_PATH_5_4", "PHPRC", "PHP_INI_SCAN_DIR", "NODE_OPTIONS", "npm_config_registry",
		"HOME", "PAGER", "EDITOR", "VISUAL", "PROMPT_COMMAND", "BASH_ENV", "ENV", "ZDOTDIR", "IFS", "BASH_FUNC_ls%%",
		"OPENSSL_CONF", "SSLKEYLOGFILE", "PSQLRC", "GCONV_PATH", "KUBE_EDITOR", "DELTA_PAGER",
	} {
		if !steers.MatchString(key) {
			t.Errorf("run takes %s", key)
		}
	}
	for _, key := range []string{"A", "PASSWORD", "DATABASE_URL", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "GITLAB_TOKEN", "HOMEPAGE", "MY_PATH", "NODES", "PROXY_PASSWORD", "OPENAI_API_KEY", "LDAP_PASSWORD", "NODE_ENV", "JAVA_HOME", "GIT_TOKEN", "HTTPS_PROXY", "PYTHONUNBUFFERED", "SSL_CERT_FILE", "KUBECONFIG", "TMPDIR"} {
		if steers.MatchString(key) {
			t.Errorf("run refuses %s", key)
		}
	}
}
