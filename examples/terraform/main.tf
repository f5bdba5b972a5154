# Groups of redis_stream_coord from Terraform, with its built-in means: no provider is needed.
#
# Needs `redis-stream-coord` in the PATH and REDIS_STREAM_COORD_URL (role WRITE) in the environment of terraform.

terraform {
  required_providers {
    external = {
      source  = "hashicorp/external"
      version = "~> 2.3"
    }
  }
}

variable "change" {
  description = "Id of the change: goes into the audit log, and makes it safe to apply again."
  type        = string
}

variable "changed_by" {
  description = "Who made the change."
  type        = string
}

# Reads only: what would have to change, drift included.
data "external" "groups" {
  program = ["python3", "${path.module}/plan.py"]

  query = {
    file = "${path.module}/groups.json"
  }
}

# The desired state is existence and number of shards. Nothing that runs is in it, so nothing that runs is ever a diff.
resource "terraform_data" "groups" {
  triggers_replace = [data.external.groups.result.trigger]

  provisioner "local-exec" {
    command = "redis-stream-coord apply \"$FILE\" --requested-by \"terraform for $CHANGED_BY\" --reason \"change $CHANGE\" --request-id \"$CHANGE\""

    environment = {
      FILE       = "${path.module}/groups.json"
      CHANGE     = var.change
      CHANGED_BY = var.changed_by
    }
  }
}

output "groups" {
  value = data.external.groups.result.summary
}
