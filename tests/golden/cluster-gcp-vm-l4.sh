# train1: gcp-vm-l4; about 0.70 US dollars per hour, even idle, until 'ftkit cluster destroy train1'

# check: a Google Cloud account is active
gcloud auth list --filter=status:ACTIVE '--format=value(account)'

# check: zone us-central1-a has g2-standard-4
gcloud compute machine-types list --project=my-project --zones=us-central1-a --filter=name=g2-standard-4 '--format=value(name)'

# network train1-net
# skipped if this prints something: gcloud compute networks list --project=my-project --filter=name=train1-net '--format=value(name)'
gcloud compute networks create train1-net --project=my-project --subnet-mode=auto

# a rule that lets Identity-Aware Proxy reach SSH
# skipped if this prints something: gcloud compute firewall-rules list --project=my-project --filter=name=train1-iap '--format=value(name)'
gcloud compute firewall-rules create train1-iap --project=my-project --network=train1-net --direction=INGRESS --allow=tcp:22 --source-ranges=35.235.240.0/20

# router train1-router
# skipped if this prints something: gcloud compute routers list --project=my-project --filter=name=train1-router '--format=value(name)'
gcloud compute routers create train1-router --project=my-project --region=us-central1 --network=train1-net

# NAT, so that the VM reaches the internet
# skipped if this prints something: gcloud compute routers nats list --project=my-project --region=us-central1 --router=train1-router --filter=name=train1-nat '--format=value(name)'
gcloud compute routers nats create train1-nat --project=my-project --region=us-central1 --router=train1-router --auto-allocate-nat-external-ips --nat-all-subnet-ip-ranges

# VM train1, g2-standard-4
# skipped if this prints something: gcloud compute instances list --project=my-project --filter=name=train1 '--format=value(name)'
gcloud compute instances create train1 --project=my-project --zone=us-central1-a --machine-type=g2-standard-4 --image-family=common-cu128-ubuntu-2204-nvidia-570 --image-project=deeplearning-platform-release --boot-disk-size=200GB --boot-disk-type=pd-balanced --network=train1-net --no-address --maintenance-policy=TERMINATE --scopes=storage-full,cloud-platform --metadata=install-nvidia-driver=True

# the GPU's driver
gcloud compute ssh train1 --project=my-project --zone=us-central1-a --tunnel-through-iap '--command=for i in $(seq 60); do nvidia-smi && exit 0; sleep 10; done; exit 1'

# removed by 'ftkit cluster destroy', in this order:
# gcloud compute instances delete train1 --project=my-project --zone=us-central1-a --quiet
# gcloud compute routers nats delete train1-nat --project=my-project --region=us-central1 --router=train1-router --quiet
# gcloud compute routers delete train1-router --project=my-project --region=us-central1 --quiet
# gcloud compute firewall-rules delete train1-iap --project=my-project --quiet
# gcloud compute networks delete train1-net --project=my-project --quiet
