package memory

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"testing"
)

// Each case has the files of a kind of machine.
func TestTheMemoryLimitIsTheSmallestOfTheProcesssGroups(t *testing.T) {
	const (
		v1 = "35 31 0:32 %s /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
		v2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
		mb = "268435456\n"
		gb = "1073741824\n"
	)
	for name, c := range map[string]struct {
		cgroup, mounts string
		limits         map[string]string
		want           int64
	}{
		"a pod or container, version 2": {"0::/\n", v2, map[string]string{"memory.max": mb}, 256 << 20},
		"systemd's MemoryMax=, version 2": {"0::/system.slice/latticekeep.service\n", v2,
			map[string]string{"system.slice/latticekeep.service/memory.max": mb, "system.slice/memory.max": "max\n"}, 256 << 20},
		"systemd's MemoryMax= of the slice": {"0::/tenants.slice/tenants-a.slice/latticekeep.service\n", v2,
			map[string]string{"tenants.slice/tenants-a.slice/latticekeep.service/memory.max": gb, "tenants.slice/tenants-a.slice/memory.max": "max\n", "tenants.slice/memory.max": mb}, 256 << 20},
		"docker --cgroupns=host, version 2": {"0::/system.slice/docker-0af1.scope\n", v2,
			map[string]string{"system.slice/docker-0af1.scope/memory.max": mb}, 256 << 20},
		"docker, its group mounted, version 2": {"0::/system.slice/docker-0af1.scope\n",
			"30 23 0:26 /system.slice/docker-0af1.scope /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
			map[string]string{"memory.max": mb}, 256 << 20},
		"a process below its container's group": {"0::/system.slice/docker-0af1.scope/init\n",
			"30 23 0:26 /system.slice/docker-0af1.scope /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
			map[string]string{"memory.max": gb, "init/memory.max": mb}, 256 << 20},
		"a group outside the namespace": {"0::/../other\n", v2, map[string]string{"memory.max": gb}, 1 << 30},
		"another group's mount": {"0::/a\n", "30 23 0:26 /abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
			map[string]string{"memory.max": gb, "bc/memory.max": mb}, 1 << 30},
		"a mount point with a space": {"0::/a\n", "30 23 0:26 / /sys/fs/c\\040g rw - cgroup2 cgroup2 rw\n",
			map[string]string{"../c g/a/memory.max": mb}, 256 << 20},
		"version 1": {"9:name=systemd:/\n4:cpu,memory:/\n", v1root(v1, "/"), map[string]string{"memory/memory.limit_in_bytes": mb}, 256 << 20},
		"a group of its own, version 1": {"4:memory:/vaults/a\n", v1root(v1, "/"),
			map[string]string{"memory/vaults/a/memory.limit_in_bytes": gb, "memory/vaults/memory.limit_in_bytes": mb, "memory/memory.limit_in_bytes": "9223372036854771712\n"}, 256 << 20},
		"docker, its group mounted, version 1": {"4:memory:/docker/0af1\n", v1root(v1, "/docker/0af1"),
			map[string]string{"memory/memory.limit_in_bytes": mb}, 256 << 20},
		"both versions, memory in version 1": {"4:memory:/a\n0::/b\n", v1root(v1, "/") + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
			map[string]string{"memory/a/memory.limit_in_bytes": mb, "unified/cgroup.procs": ""}, 256 << 20},
		"no limit, version 1":      {"4:memory:/a\n", v1root(v1, "/"), map[string]string{"memory/a/memory.limit_in_bytes": "9223372036854771712\n"}, 0},
		"no limit, version 2":      {"0::/a\n", v2, map[string]string{"a/memory.max": "max\n"}, 0},
		"of others":                {"0::/a\n", v2, map[string]string{"b/memory.max": mb, "a/c/memory.max": mb}, 0},
		"a controller like memory": {"4:memory2:/a\n", v1root(v1, "/"), map[string]string{"memory/a/memory.limit_in_bytes": mb}, 0},
		"malformed files":          {"\n4\n4:memory\n0::/a\n", "30\n- cgroup2\n" + v2, map[string]string{"a/memory.max": "much\n"}, 0},
		"no control groups":        {"", "", nil, 0},
	} {
		root := t.TempDir()
		files := maps.Clone(c.limits)
		if files == nil {
			files = make(map[string]string)
		}
		files["../../../proc/self/cgroup"], files["../../../proc/self/mountinfo"] = c.cgroup, c.mounts
		for file, text := range files {
			file = filepath.Join(root, "sys/fs/cgroup", file)
			if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got := limitOf(root); got != c.want {
			t.Errorf("%s: %d, not %d", name, got, c.want)
		}
	}
	if got := limitOf(t.TempDir()); got != 0 {
		t.Error("without /proc:", got)
	}
}

// v1root returns a line of mountinfo with the group that is mounted.
func v1root(line, group string) string { return fmt.Sprintf(line, group) }
