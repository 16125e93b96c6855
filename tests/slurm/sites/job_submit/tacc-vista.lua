-- "Common sbatch options": scripts with --gres, --gpus-per-task or --mem are rejected; -N and -n, or
-- -N and --ntasks-per-node, must be given.
function refused(job)
    if job.tres_per_node ~= nil then return "--gres is not supported" end
    -- Newer versions of Slurm have the number of cores there, too.
    if string.find(job.tres_per_task or "", "gres") then return "--gpus-per-task is not supported" end
    if job.min_mem_per_node ~= nil then return "--mem is not available" end
    if job.min_nodes == slurm.NO_VAL or job.ntasks_per_node == slurm.NO_VAL16 then return "-N and --ntasks-per-node are required" end
end
