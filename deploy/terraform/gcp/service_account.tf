# What the service may do: the calls that service/holdfast_service/stores/gcs makes, and no other. A test compares the two.
# Trainers need none of it: they send and read by URLs that this account has signed.
resource "google_service_account" "service" {
  account_id   = "${var.name}-service"
  display_name = "Holdfast's service"
}

resource "google_project_iam_custom_role" "stores" {
  role_id     = "${replace(var.name, "-", "_")}_stores"
  title       = "Holdfast's stores"
  description = "Objects of its buckets, and no bucket itself."
  permissions = [
    "storage.objects.create", # upload_from_string, a trainer's PUT
    "storage.objects.delete", # delete of a generation; to write over a record takes it too
    "storage.objects.get",    # reload, download_as_bytes, download_to_file, a trainer's GET
    "storage.objects.list",   # list_blobs: listings, generations, ping, clock, whether the bucket is there
  ]
}

resource "google_storage_bucket_iam_member" "service" {
  for_each = toset(local.stores)
  bucket   = each.value
  role     = google_project_iam_custom_role.stores.id
  member   = google_service_account.service.member
}

# A ticket is signed by IAM's signBlob, as the account itself. roles/iam.serviceAccountTokenCreator would do, and would
# also make access tokens.
resource "google_project_iam_custom_role" "signing" {
  role_id     = "${replace(var.name, "-", "_")}_signing"
  title       = "Holdfast's tickets"
  description = "Signs URLs as one account."
  permissions = ["iam.serviceAccounts.signBlob"]
}

resource "google_service_account_iam_member" "signing" {
  service_account_id = google_service_account.service.name
  role               = google_project_iam_custom_role.signing.id
  member             = google_service_account.service.member
}

resource "google_project_service" "iam_credentials" {
  service            = "iamcredentials.googleapis.com"
  disable_on_destroy = false
}

# The pod of that one Kubernetes service account, and no other, acts as it. There is no key file.
resource "google_service_account_iam_member" "workload_identity" {
  count              = var.workload_identity == null ? 0 : 1
  service_account_id = google_service_account.service.name
  role               = "roles/iam.workloadIdentityUser"
  member             = "serviceAccount:${var.project}.svc.id.goog[${var.workload_identity.namespace}/${var.workload_identity.service_account}]"
}
