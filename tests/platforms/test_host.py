"""Reading machines from recorded files, with and without limits of a control group."""

from firstlight.platforms.host import read_host

GIB = 1024**3


def machine(root, **files):
    base = {
        "proc/cpuinfo": "model name\t: Example 9000\nflags\t\t: fma avx2 avx512f\n",
        "proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {48 * GIB // 1024} kB\n",
        "proc/self/cgroup": "0::/jobs/one\n",
    }
    for name, text in (base | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_machine_without_limits(tmp_path):
    host = read_host(machine(tmp_path), affinity=8)
    assert (host.processor, host.cores, host.notes) == ("Example 9000", 8, ())
    assert host.cpu_features == {"fma", "avx2", "avx512f"}
    assert (host.memory.total_bytes, host.memory.available_bytes) == (64 * GIB, 48 * GIB)


def test_limits_of_a_parent_group_hold_too(tmp_path):
    files = {
        "sys/fs/cgroup/jobs/cpu.max": "250000 100000\n",
        "sys/fs/cgroup/jobs/one/cpu.max": "max 100000\n",
        "sys/fs/cgroup/jobs/one/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/jobs/one/memory.current": f"{6 * GIB}\n",
        "sys/fs/cgroup/jobs/one/memory.stat": f"anon 1\ninactive_file {1 * GIB}\n",
    }
    host = read_host(machine(tmp_path, **files), affinity=8)
    assert host.cores == 2
    assert (host.memory.total_bytes, host.memory.available_bytes) == (8 * GIB, 3 * GIB)
    assert len(host.notes) == 2


def test_version_one_groups(tmp_path):
    files = {
        "proc/self/cgroup": "4:cpu,cpuacct:/box\n3:memory:/box\n",
        "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "300000\n",
        "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{1 * GIB}\n",
    }
    host = read_host(machine(tmp_path, **files), affinity=16)
    assert host.cores == 3
    assert (host.memory.total_bytes, host.memory.available_bytes) == (4 * GIB, 3 * GIB)


def test_a_group_without_limit_changes_nothing(tmp_path):
    files = {
        "sys/fs/cgroup/jobs/one/memory.max": "max\n",
        "sys/fs/cgroup/jobs/one/memory.current": "5\n",
        "sys/fs/cgroup/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory.usage_in_bytes": "1\n",
    }
    assert read_host(machine(tmp_path, **files), affinity=4).memory.total_bytes == 64 * GIB
