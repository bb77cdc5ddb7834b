package charts_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"
)

// A use is one request as the API server's audit log has it, as far as RBAC decides on it.
type use struct {
	account, namespace, verb, resource, name string
	allowed                                  bool
	said                                     string
}

// serviceAccount is the user name of a ServiceAccount of the chart, but for its name.
const serviceAccount = "system:serviceaccount:" + namespace + ":"

// auditEvent is what is read of an entry of the audit log.
type auditEvent struct {
	Verb           string
	User           struct{ Username string }
	ObjectRef      *struct{ Resource, Subresource, APIGroup, Namespace, Name string }
	RequestURI     string
	ResponseStatus struct {
		Code    int
		Message string
	}
	Annotations    map[string]string
	ResponseObject struct {
		Spec struct {
			User               string
			ResourceAttributes struct{ Namespace, Verb, Group, Resource, Name string }
		}
		Status struct{ Allowed bool }
	}
}

// uses are the requests of the chart's ServiceAccounts, once each. Of the webhook there are none: what it may is asked of the server, which asks
// the API server whether it may.
func (i *installation) uses() map[use]bool {
	i.t.Helper()
	f, err := os.Open(i.audited)
	if err != nil {
		i.t.Fatal(err)
	}
	defer f.Close()
	all := make(map[use]bool)
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e auditEvent
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			continue // the last line is being written
		}
		account, ours := strings.CutPrefix(e.User.Username, serviceAccount)
		if !ours {
			continue
		}
		u := use{account: account, verb: e.Verb, allowed: e.Annotations["authorization.k8s.io/decision"] == "allow" && e.ResponseStatus.Code != 403}
		if !u.allowed {
			u.said = e.ResponseStatus.Message
		}
		if r := e.ObjectRef; r == nil {
			u.resource = e.RequestURI
		} else {
			u.resource, u.namespace, u.name = qualified(r.Resource, r.Subresource, r.APIGroup), r.Namespace, r.Name
		}
		all[u] = true
		if u.verb == "patch" && e.ResponseStatus.Code == http.StatusCreated { // server-side apply needs both rights
			u.verb = "create"
			all[u] = true
		}
		if asked, is := e.ResponseObject.Spec, e.ResponseObject.Status.Allowed; asked.User != "" && is {
			if account, ours := strings.CutPrefix(asked.User, serviceAccount); ours {
				r := asked.ResourceAttributes
				all[use{account: account, namespace: r.Namespace, verb: r.Verb, resource: qualified(r.Resource, "", r.Group), name: r.Name, allowed: true}] = true
			}
		}
	}
	if err := lines.Err(); err != nil {
		i.t.Fatal(err)
	}
	return all
}

func qualified(resource, subresource, group string) string {
	if subresource != "" {
		resource += "/" + subresource
	}
	if group != "" {
		resource += "." + group
	}
	return resource
}

// unused are the verbs that were granted to the ServiceAccounts and had no use, as lines. What is granted everywhere has to be used elsewhere than in
// the chart's own namespace, or a Role would do.
func (i *installation) unused(account func(string) bool) (lines []string) {
	i.t.Helper()
	all := i.uses()
	for _, g := range grants(i.t, i.all) {
		if strings.HasPrefix(g.subject, "people ") || !account(g.subject) {
			continue
		}
		for _, verb := range g.rule.Verbs {
			for _, group := range g.rule.APIGroups {
				for _, resource := range g.rule.Resources {
					r, sub, _ := strings.Cut(resource, "/")
					resource := qualified(r, sub, group)
					used := false
					for u := range all {
						used = used || u.allowed && u.account == g.subject && u.verb == verb && u.resource == resource &&
							(g.namespace == u.namespace || g.namespace == "" && u.namespace != namespace) &&
							(len(g.rule.ResourceNames) == 0 || slices.Contains(g.rule.ResourceNames, u.name))
					}
					if !used {
						lines = append(lines, fmt.Sprintf("%s may %s %s in %q, and never did", g.subject, verb, resource, g.namespace))
					}
				}
			}
		}
	}
	return lines
}

// awaitUses waits until the server, which does some things in its own time, has used what it was granted.
func (i *installation) awaitUses(server *pod) {
	i.t.Helper()
	late := time.After(patience)
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		unused := i.unused(func(account string) bool { return account == "latticekeep" })
		if len(unused) == 0 {
			return
		}
		select {
		case <-tick.C:
		case <-server.Done():
			i.t.Fatalf("the server ended before it used all that it was granted:\n%s\n%s", strings.Join(unused, "\n"), server.log())
		case <-late:
			i.t.Fatalf("waited in vain for the use of what was granted:\n%s", strings.Join(unused, "\n"))
		}
	}
}

// checkRefused checks that everything was allowed.
func (i *installation) checkRefused() {
	i.t.Helper()
	for u := range i.uses() {
		if !u.allowed {
			i.t.Errorf("%s was refused to %s %s %s in %q: %s", u.account, u.verb, u.resource, u.name, u.namespace, u.said)
		}
	}
}
