-- A store of schema 2 as the release before GPUs wrote it: one job with two samples and a profile.
BEGIN TRANSACTION;
CREATE TABLE boots (
        id INTEGER PRIMARY KEY,
        node INTEGER NOT NULL,
        boot_id TEXT NOT NULL,
        sequence INTEGER NOT NULL,
        time_ns INTEGER NOT NULL,
        received_ns INTEGER NOT NULL,
        report BLOB,
        UNIQUE (node, boot_id)
    );
INSERT INTO "boots" VALUES(1,1,'boot-1',1,1800000000000000000,1800000000000000000,X'1001188080D09DE9CEB8FD18208094EBDC032A230A0F0A05736C75726D120331323318E72410021802208094EBDC03408020CA01022005');
CREATE TABLE job_names (
        scheduler TEXT NOT NULL,
        name TEXT NOT NULL,
        job INTEGER NOT NULL,
        PRIMARY KEY (scheduler, name, job)
    ) WITHOUT ROWID;
INSERT INTO "job_names" VALUES('slurm','123',1);
CREATE TABLE jobs (
        id INTEGER PRIMARY KEY,
        boot INTEGER NOT NULL,
        scheduler TEXT NOT NULL,
        job_id TEXT NOT NULL,
        run INTEGER NOT NULL,
        identity BLOB NOT NULL,
        state INTEGER NOT NULL,
        first_ns INTEGER NOT NULL,
        last_ns INTEGER NOT NULL
    );
INSERT INTO "jobs" VALUES(1,1,'slurm','123',4711,X'0A05736C75726D120331323318E724',2,1800000000000000000,1800000180500000000);
CREATE TABLE nodes (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        install_id TEXT NOT NULL,
        UNIQUE (name, install_id)
    );
INSERT INTO "nodes" VALUES(1,'gpu001','install-1');
CREATE TABLE profiles (
        id INTEGER PRIMARY KEY,
        boot INTEGER NOT NULL,
        time_ns INTEGER NOT NULL,
        job INTEGER NOT NULL,
        from_ns INTEGER NOT NULL,
        to_ns INTEGER NOT NULL,
        pprof BLOB NOT NULL
    );
INSERT INTO "profiles" VALUES(1,1,1800000180500000000,1,1800000120000000000,1800000180000000000,X'1F8B0800000000000003E362E1601460E262E16016600192AC022C42125C4C8C4C426C8C0DB78E703248B170B009B003490E0976250E0E4625907A1E208B09C86212D0D0028A09702A70697001594C02DC40969C1183117B71626E414E6AB1116B727E695E8911737241A911775E625E7E716A727E5E4AB1117B79626649665EBA1173567E921167714E6951AEBEA191B1117341668A114B71496A8111AF7E7151997E495162669E5E41A5114B2E90E1D1F0A06BD18A4B3BFE4A04346C987BE83E6314D8ED0920D716300300E475383FCF000000');
CREATE TABLE samples (
        boot INTEGER NOT NULL,
        time_ns INTEGER NOT NULL,
        job INTEGER NOT NULL,
        state, processes, cpu_ns, cpu_user_ns, cpu_system_ns, memory_bytes, memory_peak_bytes, memory_limit_bytes, memory_anon_bytes, memory_file_bytes, oom_kills, io_read_bytes, io_write_bytes, io_read_ops, io_write_ops, cpu_limit_cores, throttled_ns, throttled_periods, cycles, cycles_running_ratio, instructions, instructions_running_ratio, cache_references, cache_references_running_ratio, cache_misses, cache_misses_running_ratio, branch_misses, branch_misses_running_ratio, page_faults, context_switches, migrations, run_queue_wait_ns, run_ns, forks, execs, cpu_pressure_some_us, cpu_pressure_full_us, memory_pressure_some_us, memory_pressure_full_us, io_pressure_some_us, io_pressure_full_us, network_received_bytes, network_sent_bytes, network_received_packets, network_sent_packets, network_dropped_packets, network_error_packets, delay_cpu_ns, delay_block_io_ns, delay_swap_in_ns, delay_memory_reclaim_ns,
        PRIMARY KEY (boot, time_ns, job)
    ) WITHOUT ROWID;
INSERT INTO "samples" VALUES(1,1800000000000000000,1,2,2,1000000000,NULL,NULL,4096,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,5);
INSERT INTO "samples" VALUES(1,1800000180500000000,1,2,2,3000000000,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE INDEX jobs_by_run ON jobs (boot, scheduler, run);
CREATE INDEX job_names_by_job ON job_names (job);
CREATE TRIGGER forget_names AFTER DELETE ON jobs BEGIN
        DELETE FROM job_names WHERE job = OLD.id;
    END;
CREATE INDEX jobs_by_last ON jobs (last_ns);
CREATE UNIQUE INDEX profiles_by_report ON profiles (boot, time_ns, job, from_ns);
CREATE INDEX profiles_by_job ON profiles (job, from_ns, to_ns);
COMMIT;
