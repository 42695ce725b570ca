"""Tries to break the trainer and the ops: killed runs, full disks, damaged files, random calls, threads, forks, leaks.

    python -m tools.soak --list
    python -m tools.soak --parts kills faults --seed 3
    python -m tools.soak --parts fuzz --backends cpu-sanitized --seconds 600
    python -m tools.soak.fuzz --backend cpu --replay 31007
    python -m tools.soak --table --into docs/reliability.md

Each part prints what it tried and what came out, and stores it in build/soak/results.json. The exit status is 1 if
anything failed.
"""
