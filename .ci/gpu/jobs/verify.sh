# Sourced: the installed pair counts as verified in this copy, so that the Hopper kernels run (docs/gpu.md, step 4).
own=$(python -c 'import triton; print(triton.__version__)')
minor=$(python -c 'import torch; print(*torch.__version__.split(".")[:2], sep=".")')
case $own in
3.6*) ;; # the Hopper kernels do not compile
*) sed -i "s/^VERIFIED = .*/VERIFIED = {\"$minor\": \"$own\"}/" kernels/versions.py ;;
esac
python - <<'P'
import torch, triton
print("torch", torch.__version__, "triton", triton.__version__, "cuda", torch.version.cuda)
if torch.cuda.is_available():
    from kernels.flash.dispatch import machine_lacks
    print("cudnn", torch.backends.cudnn.version(), "nccl", torch.cuda.nccl.version(), end=" ")
    print(torch.cuda.get_device_name(), "Hopper kernels lack:", machine_lacks(torch.device("cuda")))
P
