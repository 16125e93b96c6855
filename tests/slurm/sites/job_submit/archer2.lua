-- "Running jobs on the GPU nodes": a job must name its partition, its QOS and its GPUs, and one with
-- --ntasks or --cpus-per-task is rejected; gpu-exc goes with --exclusive.
function refused(job)
    if job.partition ~= "gpu" or job.qos == nil then return "a partition and a QOS must be given" end
    if job.tres_per_job == nil then return "--gpus must be given" end
    if job.num_tasks ~= slurm.NO_VAL or job.ntasks_per_node ~= slurm.NO_VAL16 or job.cpus_per_task ~= slurm.NO_VAL16 then
        return "--ntasks and --cpus-per-task must not be given"
    end
    if job.qos == "gpu-exc" and job.shared ~= 0 then return "gpu-exc goes with --exclusive" end
end
