-- "Pawsey's way for requesting resources on GPU nodes": jobs name a project of their own and ask, by
-- --gres, for packs of a GPU with its cores and memory. The page says that users should not ask for tasks,
-- cores or memory, and that a filter reads the request, not that this filter refuses it.
function refused(job)
    if job.account == nil then return "an account must be given" end
    if job.ntasks_per_node ~= slurm.NO_VAL16 or job.cpus_per_task ~= slurm.NO_VAL16 or job.min_mem_per_node ~= nil then
        return "--ntasks, --cpus-per-task and --mem must not be given"
    end
    if job.tres_per_node == nil then return "--gres must be given" end
end
