#!/usr/bin/env bash
# A SLURM of this machine alone, for trying grids: `slurm_here.sh up FOLDER` and `slurm_here.sh down FOLDER`, as root.
# Needs munge and slurm-wlm; no systemd, no accounting. Partitions: main, whose jobs make way for those of urgent.
set -eu
what=$1; mkdir -p "$2"; folder=$(cd "$2" && pwd); host=$(hostname -s)
export SLURM_CONF=$folder/slurm.conf

up() {
  mkdir -p "$folder/state" "$folder/spool"
  cat > "$SLURM_CONF" <<CONF
ClusterName=here
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=26817
SlurmdPort=26818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) RealMemory=4000
PartitionName=main Nodes=$host Default=YES PriorityTier=1 GraceTime=15
PartitionName=urgent Nodes=$host PriorityTier=10 PreemptMode=OFF
CONF
  [ -s "$folder/munge.key" ] || (umask 077; head -c 1024 /dev/urandom > "$folder/munge.key")
  munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
  slurmctld
  slurmd
  for _ in $(seq 100); do
    sinfo --noheader --format=%T 2>/dev/null | grep -q idle && { sinfo; echo "export SLURM_CONF=$SLURM_CONF"; return; }
    sleep 0.2
  done
  echo "the machine does not become idle: see $folder/slurmctld.log" >&2
  exit 1
}

down() {
  scancel --me --full 2>/dev/null || true
  for daemon in slurmd slurmctld munged; do
    [ -s "$folder/$daemon.pid" ] && kill "$(cat "$folder/$daemon.pid")" || true
  done
}

case $what in up) up ;; down) down ;; *) echo "usage: $0 up|down FOLDER" >&2; exit 2 ;; esac
