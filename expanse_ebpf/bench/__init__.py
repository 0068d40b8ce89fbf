"""The benchmark kit: what does watching cost, measured on the machine that pays for it.

plan, plan_checks        what is to be compared: workloads, arms, when to stop
schedule, session        which runs come next, in which order, until when
run, child, beside       one run of one workload beside one arm; its processes
workload, workloads/     the programs that are measured
collector, settings      an arm: agent and controller
peer                     an arm: another program
usage, descriptors       what processes took: CPU, memory, disk, network, probes
store                    what of it came into the controller's store
machine, machine_texts   what the machine is, and how it was doing
results                  the records of all that, one JSON line each
statistics               from the runs' times to intervals
figures, report, page    tables and the HTML page, from the records alone
sending, sending_form    results without names, for others
"""
