#!/usr/bin/env bash
# What a pipeline runs: `pipeline.sh plan` for a pull request, `pipeline.sh apply` once it is merged.
#
# Needs `pip install 'redis-stream-coord[cli]'`, REDIS_STREAM_COORD_URL with credentials of the role WRITE, and of the
# platform: CHANGE, the id of the change (a commit, a pull request), and CHANGED_BY, who made it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
plan_file="${PLAN_FILE:-plan.json}"

case "${1:?plan or apply}" in
plan)
  # Shown to the reviewers. Exit code 11: something would change; 0: nothing would.
  redis-stream-coord plan groups.json --out "$plan_file" --detailed-exitcode || [ $? -eq 11 ]
  ;;
apply)
  # Exactly what was reviewed: exit code 4 if somebody has changed a stream since. The request id makes it safe to run again.
  redis-stream-coord apply groups.json --plan "$plan_file" \
    --requested-by "pipeline for $CHANGED_BY" --reason "change $CHANGE" --request-id "$CHANGE"
  # The pipeline is red while something is wrong.
  redis-stream-coord plan groups.json --detailed-exitcode
  redis-stream-coord health
  ;;
*)
  echo "usage: $0 plan|apply" >&2
  exit 2
  ;;
esac
